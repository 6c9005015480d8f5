"""Bounded device waits on mailbox words, use counters, and the record of the first wait that expired.

    first load by the caller --all arrived--> use the registers
          |
          some word armed --> re-poll, 16 bytes a load --every POLLS_A_CHECK polls--> abort word? deadline passed?
                                                                                           |          |
                                                            later waits return at once <---'   compare-and-swap 0 -> 1:
                                                                                               the winner writes the record

The clock and the abort word are read once in `POLLS_A_CHECK` polls: reading them in every poll would double the time
between a word's arrival and its detection. A first check comes with the first poll, so that waits after an abort
return at once.

Preconditions:
* every thread that calls `wait_words` executes `fence.acq_rel.sys` after its last wait and before exit;
* the words are used from the registers that were checked;
* a stage that pushes also reads `read_abort` among its first loads and pushes nothing when it is set: words that an
  aborted use did not re-arm look arrived when their generation comes round again, so the fast path proves nothing then.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import ptx
from dcp_decode.mailbox import ABORT_OFFSET, RECORD_FIELDS, RECORD_OFFSET, MailboxLayout, Stage

ARMED = numerics.ARMED_WORD & 0xFFFFFFFF
POLLS_A_CHECK = 32


@cute.jit
def read_use(region: Int64, stage: cutlass.Constexpr) -> Int32:
    """This use's number from the stage's own counter (the next stage increments it)."""
    return ptx.load_global_int32(region + MailboxLayout.use_counter_offset(Stage(stage)))


@cute.jit
def read_abort(region: Int64) -> Int32:
    """Non-zero once a wait of this rank has expired: the stage may push nothing more."""
    return Int32(ptx.load_word_system(region + ABORT_OFFSET))


@cute.jit
def advance_use(region: Int64, stage: cutlass.Constexpr) -> None:
    """Increment an earlier stage's counter: one thread of the grid, after its dependency wait."""
    ptx.add_global(region + MailboxLayout.use_counter_offset(Stage(stage)), Int32(1))


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
    if _any_armed(words, count):
        begin = ptx.global_nanoseconds()
        polls = Int32(0)
        waiting = Int32(1)
        while waiting != 0:
            fresh = _load(address, count)
            for element in cutlass.range_constexpr(count):
                words[element] = fresh[element]
            if not _any_armed(words, count):
                waiting = Int32(0)
            elif polls % POLLS_A_CHECK == 0:
                elapsed = ptx.global_nanoseconds() - begin
                if read_abort(region) != 0:
                    waiting = Int32(0)
                    aborted = Int32(1)
                elif elapsed > deadline:
                    waiting = Int32(0)
                    aborted = Int32(1)
                    missing = Int32(0)
                    for element in cutlass.range_constexpr(count):
                        if words[count - 1 - element] == Uint32(ARMED):
                            missing = Int32(count - 1 - element)
                    record_expiry(region, rank, use, stage, source_rank, row, head, first_word + missing, elapsed)
            polls += 1
    return aborted


def _any_armed(words: Any, count: int) -> Any:
    armed = words[0] == Uint32(ARMED)
    for element in range(1, count):
        armed = armed | (words[element] == Uint32(ARMED))
    return armed


def _load(address: Any, count: int) -> list[Any]:
    return ptx.load_words_system(address) if count == 4 else [ptx.load_word_system(address)]


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
    if ptx.exchange_once(region + ABORT_OFFSET) == Uint32(0):
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
            ptx.store_global_int64(region + (RECORD_OFFSET + 8 * index), Int64(values[RECORD_FIELDS[index]]))
