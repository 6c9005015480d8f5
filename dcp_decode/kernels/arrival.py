"""Bounded device waits on mailbox words, use counters, and the record of the first wait that expired.

    first load by the caller --all arrived--> use the registers
       |
       some word armed --> re-poll, 16 bytes a load --every POLLS_A_CHECK polls--> abort word set?  deadline passed?
                                                                                     |                |
                                                      later waits return at once <---'   compare-and-swap 0 -> 1:
                                                                                         the winner writes the record

The clock and the abort word are read once in `POLLS_A_CHECK` polls: reading them in every poll would double the time
between a word's arrival and its detection. A first check comes with the first poll, so that waits after an abort
return at once.

Preconditions:
* a polling thread of stage 2 executes `fence.acq_rel.sys` after its last wait and before exit; one of stage 3 need not
  (docs/protocol.md, section 5);
* the words are used from the registers that were checked;
* a stage that pushes also reads `read_abort` among its first loads and pushes nothing when it is set: words that an
  aborted use did not re-arm look arrived when their generation comes round again, so the fast path proves nothing then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import memory
from dcp_decode.mailbox import (
    ABORT_OFFSET,
    RECORD_FIELDS,
    RECORD_OFFSET,
    TICKET_OFFSET,
    MailboxLayout,
    Stage,
)

ARMED = numerics.ARMED_WORD & 0xFFFFFFFF
POLLS_A_CHECK = 32


@cute.jit
def read_use(region: Int64, stage: cutlass.Constexpr) -> Int32:
    """This use's number from the stage's own counter (the next stage increments it)."""
    return memory.load_global_int32(region + MailboxLayout.use_counter_offset(Stage(stage)))


@cute.jit
def read_abort(region: Int64) -> Int32:
    """Non-zero once a wait of an earlier kernel of this stream has expired: the stage may push nothing more.

    An ordinary load: a system-scope one before the fence cost the query push 0.5 us.
    """
    return memory.load_global_int32(region + ABORT_OFFSET)


@cute.jit
def advance_use(region: Int64, stage: cutlass.Constexpr) -> None:
    """Increment an earlier stage's counter: one thread of the grid, after its dependency wait."""
    memory.add_global(region + MailboxLayout.use_counter_offset(Stage(stage)), Int32(1))


@cute.jit
def close_use(region: Int64, participants: Int32) -> None:
    """By one thread of each of `participants` that read the use number: the last one increments the stages' counters.

    It leaves them as three stages would, so that fused and staged uses may follow each other. A participant must know
    that every thread for which it stands has read the number.
    """
    last = Uint32(participants - 1)
    if memory.count_up(region + TICKET_OFFSET, last) == last:
        for stage in (Stage.TOPK, Stage.QUERY, Stage.SPARSE, Stage.MERGE):
            advance_use(region, int(stage))


@cute.jit
def wait_words(
    words: cute.Tensor,
    address: Int64,
    region: Int64,
    rank: Int32,
    use: Int32,
    deadline: Int64,
    stage: cutlass.Constexpr,
    source_rank: Int32,
    row: Int32,
    head: Int32,
    first_word: Int32,
    count: cutlass.Constexpr = 4,
) -> Int32:
    """Wait until the `count` (4 or 1) words at `address` have arrived in `words`; 1 when aborted or expired, else 0.

    words: Uint32 [count] registers, in: the first load, out: what arrived. region: own region (abort word, record).
    deadline: nanoseconds. The remaining fields name the wait in the record.
    """
    aborted = Int32(0)
    if _any_armed(words, 0, count):
        begin = memory.global_nanoseconds()
        polls = Int32(0)
        waiting = Int32(1)
        while waiting != 0:
            fresh = _load(address, count)
            for element in cutlass.range_constexpr(count):
                words[element] = fresh[element]
            if not _any_armed(words, 0, count):
                waiting = Int32(0)
            elif polls % POLLS_A_CHECK == 0:
                elapsed = memory.global_nanoseconds() - begin
                if memory.load_word_system(region + ABORT_OFFSET) != Uint32(0):
                    waiting = Int32(0)
                    aborted = Int32(1)
                elif elapsed > deadline:
                    waiting = Int32(0)
                    aborted = Int32(1)
                    missing = first_armed(words, 0, count)
                    record_expiry(region, rank, use, stage, source_rank, row, head, first_word + missing, elapsed)
            polls += 1
    return aborted


@dataclass(frozen=True)
class Place:
    """Four words that one thread waits for: the source rank, bytes from the thread's address, words from its first."""

    source: int
    offset: int
    word: int = 0


@cute.jit
def wait_places(
    words: cute.Tensor,
    wanted: cute.Tensor,
    places: cutlass.Constexpr,
    address: Int64,
    region: Int64,
    rank: Int32,
    use: Int32,
    deadline: Int64,
    stage: cutlass.Constexpr,
    row: Int32,
    head: Int32,
    first_word: Int32,
) -> Int32:
    """Wait for the four words of every place whose source is wanted; 1 when aborted or expired, else 0.

    words: Uint32 [4 places] registers, in: the first loads, out: what arrived. wanted: Int32 [D], 0 for a source whose
    words are never waited for. places: tuple of `Place`. One loop for all: the missing ones are polled together, and
    the slow path exists once in the code.
    """
    aborted = Int32(0)
    if _missing(words, wanted, places) != 0:
        begin = memory.global_nanoseconds()
        polls = Int32(0)
        waiting = Int32(1)
        while waiting != 0:
            for index in cutlass.range_constexpr(len(places)):
                if (wanted[places[index].source] != 0) & _any_armed(words, 4 * index, 4):
                    fresh = memory.load_words_system(address + places[index].offset)
                    for element in cutlass.range_constexpr(4):
                        words[4 * index + element] = fresh[element]
            if _missing(words, wanted, places) == 0:
                waiting = Int32(0)
            elif polls % POLLS_A_CHECK == 0:
                elapsed = memory.global_nanoseconds() - begin
                if memory.load_word_system(region + ABORT_OFFSET) != Uint32(0):
                    waiting = Int32(0)
                    aborted = Int32(1)
                elif elapsed > deadline:
                    waiting = Int32(0)
                    aborted = Int32(1)
                    # From the last place to the first: the record names the first that is missing.
                    source = Int32(0)
                    word = first_word
                    for turn in cutlass.range_constexpr(len(places)):
                        index = len(places) - 1 - turn
                        if (wanted[places[index].source] != 0) & _any_armed(words, 4 * index, 4):
                            source = Int32(places[index].source)
                            word = first_word + places[index].word + first_armed(words, 4 * index, 4)
                    record_expiry(region, rank, use, stage, source, row, head, word, elapsed)
            polls += 1
    return aborted


@cute.jit
def _missing(words: cute.Tensor, wanted: cute.Tensor, places: cutlass.Constexpr) -> Int32:
    """Non-zero while a place of a wanted source has an armed word."""
    missing = Int32(0)
    for index in cutlass.range_constexpr(len(places)):
        if _any_armed(words, 4 * index, 4):
            missing = missing | wanted[places[index].source]
    return missing


@cute.jit
def first_armed(words: cute.Tensor, first: cutlass.Constexpr, count: cutlass.Constexpr) -> Int32:
    """Number of the first armed word among words[first .. first + count - 1], counted from `first`."""
    missing = Int32(0)
    for element in cutlass.range_constexpr(count):
        if words[first + count - 1 - element] == Uint32(ARMED):
            missing = Int32(count - 1 - element)
    return missing


def _any_armed(words: Any, first: int, count: int) -> Any:
    armed = words[first] == Uint32(ARMED)
    for element in range(first + 1, first + count):
        armed = armed | (words[element] == Uint32(ARMED))
    return armed


def _load(address: Any, count: int) -> list[Any]:
    return memory.load_words_system(address) if count == 4 else [memory.load_word_system(address)]


@cute.jit
def record_expiry(
    region: Int64,
    rank: Int32,
    use: Int32,
    stage: cutlass.Constexpr,
    source_rank: Int32,
    row: Int32,
    head: Int32,
    word: Int32,
    elapsed: Int64,
) -> None:
    """Set the sticky abort word; the thread that set it writes the record (the word seen was armed)."""
    if memory.exchange_once(region + ABORT_OFFSET) == Uint32(0):
        x, y, z = cute.arch.block_idx()
        columns, lines, _ = cute.arch.grid_dim()
        values = {
            "stage": Int32(stage),
            "waiting_rank": rank,
            "source_rank": source_rank,
            "row": row,
            "head": head,
            "word": word,
            "use": use,
            "value_seen": Int32(numerics.ARMED_WORD),
            "cta": (z * lines + y) * columns + x,
            "nanoseconds": elapsed,
        }
        for index in cutlass.range_constexpr(len(RECORD_FIELDS)):
            memory.store_global_int64(region + (RECORD_OFFSET + 8 * index), Int64(values[RECORD_FIELDS[index]]))
