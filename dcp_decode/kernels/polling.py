"""Waits of the fused chain: a thread polls all that it misses at once.

`arrival` waits for one place after the other, which costs nothing where the words are there when a kernel begins. In
the fused chain they come while it polls, and each place would cost a latency of its own (five pieces of query: 1.5 us).

The first check of the abort word and the clock comes with the second poll; the abort word is loaded beside the words.
The deadline counts from there. Preconditions and record: as in `arrival`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.arrival import ARMED, POLLS_A_CHECK, first_armed, record_expiry
from dcp_decode.mailbox import ABORT_OFFSET, Stage

EMPTY_LSE = numerics.EMPTY_LSE_BITS & 0xFFFFFFFF
FIRST_CHECK = 1
LSE_BIT = 16  # of the mask of missing sources: D is 16 at most


@dataclass(frozen=True)
class Waiter:
    """Who waits, as DSL values: own region (abort word, record), rank, use, deadline of a wait in nanoseconds."""

    region: Any
    rank: Any
    use: Any
    deadline: Any


@dataclass(frozen=True)
class Place:
    """What a piece of a wait is, for the record, as DSL values: the rank that writes it, row, head, its first word."""

    source: Any
    row: Any
    head: Any
    word: Any


@cute.jit
def wait_pieces(
    waiter: Waiter,
    words: cute.Tensor,
    addresses: Sequence[Int64],
    stage: cutlass.Constexpr,
    place: Callable[[int], Place],
) -> Int32:
    """Wait until all pieces of four words at `addresses` have arrived; 1 when aborted or expired, else 0.

    words: Uint32 [4 x pieces] registers, in: the first loads, out: what arrived. place: of a piece by its number,
    traced where a wait expires. A thread polls all that it misses at once: one after the other, every piece that comes
    late would cost a latency of its own (five pieces: 1.5 us in the fused chain).
    """
    aborted = Int32(0)
    pieces = len(addresses)
    if _any_armed(words, 0, 4 * pieces):
        begin = Int64(0)
        polls = Int32(0)
        waiting = Int32(1)
        while waiting != 0:
            abort_word = load_abort(waiter.region, polls)
            for index in cutlass.range_constexpr(pieces):
                if _any_armed(words, 4 * index, 4):
                    fresh = memory.load_words_system(addresses[index])
                    for element in cutlass.range_constexpr(4):
                        words[4 * index + element] = fresh[element]
            if not _any_armed(words, 0, 4 * pieces):
                waiting = Int32(0)
            elif is_check(polls):
                now = memory.global_nanoseconds()
                if polls == FIRST_CHECK:
                    begin = now
                elapsed = now - begin
                if abort_word != Uint32(0):
                    waiting = Int32(0)
                    aborted = Int32(1)
                elif elapsed > waiter.deadline:
                    waiting = Int32(0)
                    aborted = Int32(1)
                    # From the last piece to the first: the record names the first that is missing.
                    source = row = head = word = Int32(0)
                    for turn in cutlass.range_constexpr(pieces):
                        index = pieces - 1 - turn
                        if _any_armed(words, 4 * index, 4):
                            missing = place(index)
                            source, row, head = missing.source, missing.row, missing.head
                            word = missing.word + first_armed(words, 4 * index, 4)
                    record_expiry(waiter.region, waiter.rank, waiter.use, stage, source, row, head, word, elapsed)
            polls += 1
    return aborted


def is_check(polls: Any) -> Any:
    """Whether a poll looks at the abort word and the clock: the second one, and then one in POLLS_A_CHECK."""
    return polls % POLLS_A_CHECK == FIRST_CHECK


@cute.jit
def load_abort(region: Int64, polls: Int32) -> Uint32:
    """The abort word in a poll that checks, to be loaded beside the words of that poll; else 0."""
    word = Uint32(0)
    if is_check(polls):
        word = memory.load_word_system(region + ABORT_OFFSET)
    return word


@cute.jit
def wait_sources(
    waiter: Waiter,
    own_lse: Uint32,
    lse: cute.Tensor,
    words: cute.Tensor,
    sources: cutlass.Constexpr,
    lse_address: Int64,
    payload_address: Int64,
    source_bytes: cutlass.Constexpr,
    row: Int32,
    head: Int32,
    first_word: Int32,
    count: cutlass.Constexpr,
) -> Int32:
    """Wait for the LSE word and the `count` payload words of every source; 1 when aborted or expired, else 0.

    own_lse: this lane's first load of the LSE of source lane % D. lse: Uint32 [D] registers, out: of all sources.
    words: Uint32 [count x D] registers, in: the first loads of payload, out: what arrived; those of a source whose LSE
    is EMPTY_LSE are never waited for. payload_address: of source 0, the others follow at `source_bytes`. A warp polls
    all that it misses at once and leaves together: each lane needs the LSEs of the others.
    """
    aborted = Int32(0)
    begin = Int64(0)
    polls = Int32(0)
    waiting = Int32(1)
    while waiting != 0:
        abort_word = load_abort(waiter.region, polls)
        for source in cutlass.range_constexpr(sources):
            lse[source] = ptx.shuffle(own_lse, Int32(source))
        if own_lse == Uint32(ARMED):
            own_lse = memory.load_word_system(lse_address)
        for source in cutlass.range_constexpr(sources):
            if _any_armed(words, count * source, count) & (lse[source] != Uint32(EMPTY_LSE)):
                fresh = memory.load_words_system(payload_address + source * source_bytes, count)
                for element in cutlass.range_constexpr(count):
                    words[count * source + element] = fresh[element]
        # A short test first: mostly no source is empty, and then it is all that stands between arrival and merge.
        incomplete = Int32(0)
        if _any_armed(words, 0, count * sources, own_lse):
            incomplete = Int32(1)
        waiting = ptx.warp_any(incomplete)
        if waiting != 0:
            missing = _missing(own_lse, lse, words, sources, count)
            waiting = ptx.warp_any(missing)
            if (waiting != 0) & is_check(polls):
                now = memory.global_nanoseconds()
                if polls == FIRST_CHECK:
                    begin = now
                elapsed = now - begin
                gave_up = Int32(0)
                if abort_word != Uint32(0):
                    gave_up = Int32(1)
                elif (elapsed > waiter.deadline) & (missing != 0):
                    gave_up = Int32(1)
                    # From the last source to the first: the record names the first that is missing; an LSE is word 0.
                    missed = Int32(0)
                    word = Int32(0)
                    for turn in cutlass.range_constexpr(sources):
                        source = sources - 1 - turn
                        if missing >> source & 1 != 0:
                            missed = Int32(source)
                            word = first_word + first_armed(words, count * source, count)
                            if missing >> (LSE_BIT + source) & 1 != 0:
                                word = Int32(0)
                    record_expiry(
                        waiter.region, waiter.rank, waiter.use, int(Stage.MERGE), missed, row, head, word, elapsed
                    )
                aborted = ptx.warp_any(gave_up)
                if aborted != 0:
                    waiting = Int32(0)
        polls += 1
    for source in cutlass.range_constexpr(sources):
        lse[source] = ptx.shuffle(own_lse, Int32(source))
    return aborted


@cute.jit
def _missing(
    own_lse: Uint32, lse: cute.Tensor, words: cute.Tensor, sources: cutlass.Constexpr, count: cutlass.Constexpr
) -> Int32:
    """Bit s: source s owes its LSE, or payload that its LSE does not rule out; bit LSE_BIT + s: its LSE.

    All LSEs are left in `lse`.
    """
    missing = Int32(0)
    for source in cutlass.range_constexpr(sources):
        lse[source] = ptx.shuffle(own_lse, Int32(source))
        if lse[source] == Uint32(ARMED):
            missing = missing | _signed(1 << source | 1 << (LSE_BIT + source))
        elif _any_armed(words, count * source, count) & (lse[source] != Uint32(EMPTY_LSE)):
            missing = missing | Int32(1 << source)
    return missing


def _signed(bits: int) -> Int32:
    return Int32(bits - (bits >> 31 << 32))


def _any_armed(words: Any, first: int, count: int, other: Any = None) -> Any:
    """Whether one of words[first .. first + count - 1], or `other`, is armed: the largest word there is."""
    largest = words[first] if other is None else ptx.maximum_word(words[first], other)
    for element in range(first + 1, first + count):
        largest = ptx.maximum_word(largest, words[element])
    return largest == Uint32(ARMED)
