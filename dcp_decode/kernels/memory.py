"""PTX instructions on memory that CuTe DSL does not wrap as the kernels need them, one function each.

Addresses are integers: Int64 global (or peer) addresses, Int32 shared addresses; words are Uint32. Those that touch
memory are volatile, so that loads are neither merged nor moved (`inline_ptx`). Plain Python (not traced by the DSL):
callable from kernels and from each other, with DSL values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from dcp_decode.kernels.inline_ptx import instruction

_VECTOR_SUFFIX = {1: "", 2: ".v2", 4: ".v4"}


def _vector(first: int, count: int) -> str:
    names = ",".join(f"${first + index}" for index in range(count))
    return f"{{{names}}}" if count > 1 else names


# Global memory -------------------------------------------------------------------------------------------------------


def load_global_int32(address: Any) -> Any:
    """ld.global.b32: an int32 that no other stage writes while this grid runs."""
    return instruction("ld.global.b32 $0, [$1];", [Int32], [address])


def load_global_int64(address: Any) -> Any:
    """ld.global.b64: a peer base address of the table."""
    return instruction("ld.global.b64 $0, [$1];", [Int64], [address])


def load_global_words(address: Any) -> list[Any]:
    """ld.global.v4.b32: four words that no other stage writes while this grid runs."""
    return instruction("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", [Uint32] * 4, [address])


def load_base(address: Any) -> Any:
    """ld.relaxed.gpu.b64: a peer base address; relaxed, or ptxas moves the load to its use, behind a branch."""
    return instruction("ld.relaxed.gpu.global.b64 $0, [$1];", [Int64], [address])


def load_words_system(address: Any, count: int = 4) -> list[Any]:
    """ld.relaxed.sys[.v2/.v4].b32: adjacent mailbox words; each may be old or new on its own."""
    code = f"ld.relaxed.sys.global{_VECTOR_SUFFIX[count]}.b32 {_vector(0, count)}, [${count}];"
    values = instruction(code, [Uint32] * count, [address])
    return [values] if count == 1 else values


def load_word_system(address: Any) -> Any:
    """ld.relaxed.sys.b32: one mailbox or control word."""
    return load_words_system(address, 1)[0]


def store_words_system(address: Any, words: Sequence[Any]) -> None:
    """st.relaxed.sys[.v2/.v4].b32: adjacent mailbox words, aligned as a whole."""
    count = len(words)
    code = f"st.relaxed.sys.global{_VECTOR_SUFFIX[count]}.b32 [$0], {_vector(1, count)};"
    instruction(code, [], [address, *words])


def store_word_system(address: Any, word: Any) -> None:
    """st.relaxed.sys.b32: one mailbox word."""
    store_words_system(address, [word])


def store_global(address: Any, words: Sequence[Any]) -> None:
    """st.global[.v2/.v4].b32: an ordinary output of this rank."""
    count = len(words)
    instruction(f"st.global{_VECTOR_SUFFIX[count]}.b32 [$0], {_vector(1, count)};", [], [address, *words])


def store_global_int64(address: Any, value: Any) -> None:
    """st.relaxed.sys.b64: one field of a record that the host reads."""
    instruction("st.relaxed.sys.global.b64 [$0], $1;", [], [address, value])


def add_global(address: Any, value: Any) -> None:
    """red.relaxed.gpu.add.u32: a use counter of this device."""
    instruction("red.relaxed.gpu.global.add.u32 [$0], $1;", [], [address, value])


def count_up(address: Any, last: Any) -> Any:
    """atom.acq_rel.gpu.inc.u32: the old count; `last` is followed by 0. Orders what all who counted did before."""
    return instruction("atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", [Uint32], [address, last])


def exchange_once(address: Any) -> Any:
    """atom.cas.sys 0 -> 1: the old word, 0 for the one thread that set it."""
    return instruction("atom.relaxed.sys.global.cas.b32 $0, [$1], 0, 1;", [Uint32], [address])


def global_nanoseconds() -> Any:
    """%globaltimer: nanoseconds, coarse; for deadlines only."""
    return instruction("mov.u64 $0, %globaltimer;", [Int64], [])


# Shared memory and clusters ------------------------------------------------------------------------------------------


def load_shared(address: Any, count: int, kind: Any = Float32) -> list[Any]:
    """ld.shared[.v2/.v4].b32: `count` adjacent words."""
    values = instruction(
        f"ld.shared{_VECTOR_SUFFIX[count]}.b32 {_vector(0, count)}, [${count}];", [kind] * count, [address]
    )
    return [values] if count == 1 else values


def load_shared_address(address: Any) -> Any:
    """ld.shared.b64: a peer base address."""
    return instruction("ld.shared.b64 $0, [$1];", [Int64], [address])


def store_shared_address(address: Any, value: Any) -> None:
    """st.shared.b64: a peer base address."""
    instruction("st.shared.b64 [$0], $1;", [], [address, value])


def store_shared(address: Any, values: Sequence[Any]) -> None:
    """st.shared[.v2/.v4].b32: adjacent words."""
    count = len(values)
    instruction(f"st.shared{_VECTOR_SUFFIX[count]}.b32 [$0], {_vector(1, count)};", [], [address, *values])


def store_shared_half(address: Any, half: Any) -> None:
    """st.shared.b16: two bytes."""
    instruction("st.shared.b16 [$0], $1;", [], [address, half])


def load_matrices(address: Any, count: int, transposed: bool = False) -> list[Any]:
    """ldmatrix.x1/x2/x4 [.trans]: `count` 8 x 8 matrices of 16-bit elements, one row address a lane."""
    suffix = ".trans" if transposed else ""
    values = instruction(
        f"ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {_braced(count)}, [${count}];",
        [Uint32] * count,
        [address],
    )
    return [values] if count == 1 else values


def _braced(count: int) -> str:
    return "{" + ",".join(f"${index}" for index in range(count)) + "}"


def wait_barrier(address: Any, parity: Any, ready: Sequence[Any] = (), scratch: Any = 0) -> None:
    """mbarrier.try_wait until the phase of this parity has completed; no time hint: with one, a thread wakes late.

    ready: words that must be computed before the wait. ptxas would move their instructions behind it, to where they are
    used first; so a thread that has to wait stores a checksum of them at the shared address `scratch`.
    """
    lines = [f"xor.b32 t, t, ${3 + index};" for index in range(len(ready))]
    touched = ["mov.b32 t, 0;", *lines, "st.shared.b32 [$2], t;"] if ready else []
    instruction(
        "{\n.reg .pred p;\n.reg .b32 t;\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n@p bra done;\n"
        + "\n".join(touched)
        + "\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n@!p bra again;\ndone:\n}",
        [],
        [address, parity, scratch, *ready],
    )


def wait_cluster_barrier(address: Any, parity: Any) -> None:
    """`wait_barrier` on one where peer CTAs arrive: acquires what they released."""
    instruction(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], $1;\n"
        "@!p bra again;\n}",
        [],
        [address, parity],
    )


def arrive_cluster(address: Any) -> None:
    """mbarrier.arrive.release.cluster on a peer CTA's mbarrier (`map_shared`)."""
    instruction("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", [], [address])


def map_shared(address: Any, cta: Any) -> Any:
    """mapa.shared::cluster: the address of the same shared byte in another CTA of the cluster."""
    return instruction("mapa.shared::cluster.u32 $0, $1, $2;", [Int32], [address, cta], pure=True)


def store_async(address: Any, values: Sequence[Any], barrier: Any) -> None:
    """st.async[.v2/.v4].b32: words into a peer CTA's shared memory, counted as bytes by that CTA's mbarrier."""
    count = len(values)
    suffix = _VECTOR_SUFFIX[count]
    instruction(
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{suffix}.b32 [$0], {_vector(2, count)}, [$1];",
        [],
        [address, barrier, *values],
    )


def copy_async(destination: Any, source: Any, count_bytes: Any) -> None:
    """cp.async.cg of 16 bytes global to own shared memory, zeros after the first `count_bytes` (0 reads nothing)."""
    instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [destination, source, count_bytes])


def bulk_load(destination: Any, source: Any, count_bytes: int, barrier: Any) -> None:
    """cp.async.bulk global to own shared memory: 16-byte aligned, counted as bytes by an mbarrier of this CTA."""
    instruction(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        [],
        [destination, source, count_bytes, barrier],
    )


def bulk_multicast(destination: Any, source: Any, count_bytes: int, barrier: Any, ctas: Any) -> None:
    """`bulk_load` to the same place, counted by the same mbarrier, of every CTA whose bit of `ctas` is set."""
    instruction(
        "{\n.reg .b16 ctas;\ncvt.u16.u32 ctas, $4;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[$0], [$1], $2, [$3], ctas;\n}",
        [],
        [destination, source, count_bytes, barrier, ctas],
    )


def bulk_send(destination: Any, source: Any, count_bytes: int, barrier: Any) -> None:
    """cp.async.bulk own shared memory to a peer CTA's, counted as bytes by the peer's mbarrier."""
    instruction(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        [],
        [destination, source, count_bytes, barrier],
    )


def fence_async_shared() -> None:
    """fence.proxy.async: this thread's shared stores become visible to bulk copies."""
    instruction("fence.proxy.async.shared::cta;", [], [])
