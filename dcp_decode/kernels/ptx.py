"""Every PTX instruction that the kernels use and CuTe DSL does not wrap as they need it, one function each.

Addresses are integers: Int64 global (or peer) addresses, Int32 shared addresses; words are Uint32. An instruction is
volatile unless it is a pure function of registers, so that loads are neither merged nor moved (`inline_ptx`). Plain
Python (not traced by the DSL): callable from kernels and from each other, with DSL values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int16, Int32, Int64, Uint32

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


# Registers -----------------------------------------------------------------------------------------------------------


def opaque(value: Any) -> Any:
    """mov.b32 that the compiler can't see through: what follows from it is computed here, not kept in registers."""
    return instruction("mov.b32 $0, $1;", [Int32], [value])


def grid_z() -> Any:
    """%ctaid.z, read here: the compiler keeps no register for it until then."""
    return instruction("mov.u32 $0, %ctaid.z;", [Int32], [])


def minimum_int32(left: Any, right: Any) -> Any:
    """min.s32."""
    return instruction("min.s32 $0, $1, $2;", [Int32], [left, right], pure=True)


def maximum_int32(left: Any, right: Any) -> Any:
    """max.s32."""
    return instruction("max.s32 $0, $1, $2;", [Int32], [left, right], pure=True)


def maximum_word(left: Any, right: Any) -> Any:
    """max.u32."""
    return instruction("max.u32 $0, $1, $2;", [Uint32], [left, right], pure=True)


def maximum(left: Any, right: Any) -> Any:
    """max.f32: the other operand where one is NaN."""
    return instruction("max.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def minimum(left: Any, right: Any) -> Any:
    """min.f32: the other operand where one is NaN."""
    return instruction("min.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def warp_maximum(value: Any) -> Any:
    """redux.sync.max.s32 on order-preserving integers: the largest FP32 of a warp (sm_90 has no FP32 redux).

    A NaN counts as larger than +inf or smaller than -inf, by its sign.
    """
    flip = "{\n.reg .s32 s;\nshr.s32 s, $1, 31;\nand.b32 s, s, 0x7fffffff;\nxor.b32 $0, $1, s;\n}"
    ordered = instruction(flip, [Uint32], [float_bits(value)], pure=True)
    largest = instruction("redux.sync.max.s32 $0, $1, 0xffffffff;", [Uint32], [ordered])
    return bits_float(instruction(flip, [Uint32], [largest], pure=True))


def shuffle(word: Any, lane: Any) -> Any:
    """shfl.sync.idx.b32: the word that `lane` of this warp holds; all lanes take part."""
    return instruction("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", [Uint32], [word, lane])


def warp_any(value: Any) -> Any:
    """vote.sync.any: 1 for all lanes of this warp where one has a non-zero int32, else 0; all lanes take part."""
    code = "{\n.reg .pred p;\nsetp.ne.s32 p, $1, 0;\nvote.sync.any.pred p, p, 0xffffffff;\nselp.s32 $0, 1, 0, p;\n}"
    return instruction(code, [Int32], [value])


def barrier_any(value: Any, barrier: Any = None, threads: int = 0) -> Any:
    """barrier.red.or over the CTA, or the `threads` of a named barrier: non-zero for all where one has a non-zero."""
    chosen = "0" if barrier is None else f"$2, {threads}"
    code = (
        f"{{\n.reg .pred p;\nsetp.ne.s32 p, $1, 0;\nbarrier.cta.red.or.pred p, {chosen}, p;\nselp.s32 $0, 1, 0, p;\n}}"
    )
    return instruction(code, [Int32], [value] if barrier is None else [value, barrier])


def multiply(left: Any, right: Any) -> Any:
    """mul.rn.f32: never contracted into an fma, so that every variant rounds alike."""
    return instruction("mul.rn.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def add(left: Any, right: Any) -> Any:
    """add.rn.f32: never contracted into an fma."""
    return instruction("add.rn.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def multiply_add(left: Any, right: Any, addend: Any) -> Any:
    """fma.rn.f32: left * right + addend, one rounding."""
    return instruction("fma.rn.f32 $0, $1, $2, $3;", [Float32], [left, right, addend], pure=True)


def replace_if_nan(word: Any, probe: Any, replacement: int) -> Any:
    """selp.b32: `replacement` where the FP32 `probe` is NaN, else `word`."""
    code = f"{{\n.reg .pred p;\nsetp.nan.f32 p, $2, $2;\nselp.b32 $0, {replacement:#x}, $1, p;\n}}"
    return instruction(code, [Uint32], [word, probe], pure=True)


def select_less(left: Any, right: Any, below: Any, otherwise: Any) -> Any:
    """selp.f32: `below` where the int32 `left` < `right`, else `otherwise`."""
    code = "{\n.reg .pred p;\nsetp.lt.s32 p, $1, $2;\nselp.f32 $0, $3, $4, p;\n}"
    return instruction(code, [Float32], [left, right, below, otherwise], pure=True)


def select_less_int32(left: Any, right: Any, below: int, otherwise: int) -> Any:
    """selp.s32: `below` where the int32 `left` < `right`, else `otherwise`; both constants."""
    code = f"{{\n.reg .pred p;\nsetp.lt.s32 p, $1, $2;\nselp.s32 $0, {below}, {otherwise}, p;\n}}"
    return instruction(code, [Int32], [left, right], pure=True)


def exp2(value: Any) -> Any:
    """ex2.approx.ftz.f32."""
    return instruction("ex2.approx.ftz.f32 $0, $1;", [Float32], [value], pure=True)


def log2(value: Any) -> Any:
    """lg2.approx.f32."""
    return instruction("lg2.approx.f32 $0, $1;", [Float32], [value], pure=True)


def divide(numerator: Any, denominator: Any) -> Any:
    """div.full.f32: within 2 units in the last place, subnormals kept, no slow path."""
    return instruction("div.full.f32 $0, $1, $2;", [Float32], [numerator, denominator], pure=True)


def float_bits(value: Any) -> Any:
    """The bits of an FP32."""
    return instruction("mov.b32 $0, $1;", [Uint32], [value], pure=True)


def bits_float(word: Any) -> Any:
    """The FP32 of these bits."""
    return instruction("mov.b32 $0, $1;", [Float32], [word], pure=True)


def permute_bytes(low: Any, high: Any, selector: int) -> Any:
    """prmt.b32: four of the eight bytes (low = 0..3, high = 4..7), one selector nibble a byte."""
    return instruction(f"prmt.b32 $0, $1, $2, {selector:#x};", [Uint32], [low, high], pure=True)


def rotate_right(word: Any, bits: int) -> Any:
    """shf.r.wrap.b32 of a word with itself."""
    return instruction(f"shf.r.wrap.b32 $0, $1, $1, {bits};", [Uint32], [word], pure=True)


def e4m3_pair(low: Any, high: Any) -> Any:
    """cvt.rn.satfinite.e4m3x2.f32: two bytes, `low` in the low one; NaN becomes 0x7F."""
    return instruction("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", [Int16], [low, high], pure=True)


def e4m3_to_f16(word: Any) -> list[Any]:
    """Two cvt.rn.f16x2.e4m3x2: four E4M3 bytes as two f16x2 words (exact), low bytes first."""
    code = (
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 $0, low;\ncvt.rn.f16x2.e4m3x2 $1, high;\n}"
    )
    return instruction(code, [Uint32, Uint32], [word], pure=True)


def bf16_pair(low: Any, high: Any) -> Any:
    """cvt.rn.bf16x2.f32: two BF16, `low` in the low half."""
    return instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", [Uint32], [low, high], pure=True)


def bf16_pair_canonical(low: Any, high: Any) -> Any:
    """bf16_pair with 0x7FFF selected for each value that is NaN."""
    code = (
        "{\n.reg .pred p, q;\n.reg .b16 l, h;\n.reg .b32 w;\ncvt.rn.bf16x2.f32 w, $2, $1;\nmov.b32 {l, h}, w;\n"
        "setp.nan.f32 p, $1, $1;\nsetp.nan.f32 q, $2, $2;\n"
        "selp.b16 l, 0x7fff, l, p;\nselp.b16 h, 0x7fff, h, q;\nmov.b32 $0, {l, h};\n}"
    )
    return instruction(code, [Uint32], [low, high], pure=True)


def bf16_values(word: Any) -> list[Any]:
    """The two BF16 of a word as FP32, the low half first."""
    code = "{\n.reg .b32 t;\nshl.b32 t, $2, 16;\nmov.b32 $0, t;\nand.b32 t, $2, 0xffff0000;\nmov.b32 $1, t;\n}"
    return instruction(code, [Float32, Float32], [word], pure=True)


def e4m3_word(values: Sequence[Any]) -> Any:
    """Four FP32 as E4M3 bytes (nearest even, saturating), 0x7F selected for every NaN byte."""
    code = (
        "{\n.reg .b16 l, h;\n.reg .b32 w, t;\ncvt.rn.satfinite.e4m3x2.f32 l, $2, $1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;\nmov.b32 w, {l, h};\n"
        "and.b32 t, w, 0x7f7f7f7f;\nadd.u32 t, t, 0x01010101;\nand.b32 t, t, 0x80808080;\n"
        "not.b32 t, t;\nand.b32 $0, w, t;\n}"
    )
    return instruction(code, [Uint32], list(values), pure=True)


def mma_f16(left: Sequence[Any], right: Sequence[Any], accumulator: Sequence[Any]) -> list[Any]:
    """mma.m16n8k16 f16 x f16 + FP32: `left` 4 words (16 x 16), `right` 2 words (16 x 8), `accumulator` 4 FP32."""
    return instruction(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        [Float32] * 4,
        [*left, *right, *accumulator],
        pure=True,
    )
