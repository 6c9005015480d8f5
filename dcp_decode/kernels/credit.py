"""The credit exchange: one warp of a grid carries the order of a rank's re-arms to its peers, so that no other fences.

    lane s < D    fence --> push credit word to rank s --> wait for the credit word of rank s --> re-arm it --> fence

A peer may push to a word again only if this rank's re-arm of it is ordered before. That order needs one release and one
acquire for each pair of ranks in each use, on whichever word: with a word of its own they stand beside the attention
instead of before the query push (0.6 us) and at the exit of every CTA that polls.

Precondition: every re-arm of the uses before lies in a grid behind the dependency wait that the warp has passed. The
protocol model proves it (docs/protocol.md, section 6), and shows what breaks without a part of it.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.geometry import Geometry
from dcp_decode.kernels import arrival, memory, polling
from dcp_decode.mailbox import MailboxLayout, Stage

NO_PLACE = -1  # a credit word belongs to no row and no head


@cute.jit
def exchange_credit(geometry: Geometry, waiter: polling.Waiter, table: Any, aborted: Any, lane: Any) -> None:
    """By one warp of the grid. table: address of the peers' base addresses; aborted: non-zero: push nothing."""
    if lane < geometry.dcp:
        slots = Int64(waiter.use % geometry.generations) * geometry.dcp
        section = MailboxLayout(geometry).credit.offset
        peer = memory.load_base(table + Int64(lane) * 8)
        # Release: orders all that this rank read and re-armed in the uses before (dependency wait) before the credit.
        cute.arch.fence_acq_rel_sys()
        if aborted == 0:
            memory.store_word_system(peer + section + (slots + Int64(waiter.rank)) * 4, Uint32(waiter.use))
        own = waiter.region + section + (slots + Int64(lane)) * 4
        word = cute.make_rmem_tensor(1, Uint32)
        word[0] = memory.load_word_system(own)
        expired = arrival.wait_words(
            word, own, waiter.region, waiter.rank, waiter.use, waiter.deadline, int(Stage.SPARSE), lane,
            Int32(NO_PLACE), Int32(NO_PLACE), Int32(0), 1,
        )  # fmt: skip
        if expired == 0:
            memory.store_word_system(own, Uint32(numerics.ARMED_WORD & 0xFFFFFFFF))
        # Acquire: orders what the peers released with their credits before all that this rank pushes in later grids.
        cute.arch.fence_acq_rel_sys()
