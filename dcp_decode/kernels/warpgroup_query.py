"""The query of the warpgroup decode: polled by the query warps, unpacked to f16, the right operand of the scores.

A piece is 16 E4M3 bytes of a head. The keys' bytes reach the tensor cores in the order in which ldmatrix delivers them,
so the query takes the same one: of a 16-byte piece, b0 b1 b4 b5 b8 b9 b12 b13 are the first 16 bytes of f16 and
b2 b3 b6 b7 b10 b11 b14 b15 the next. Eight threads take four pieces of two heads: their stores meet no bank conflict.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from dcp_decode.kernels import ptx, wgmma
from dcp_decode.kernels.polled_query import PolledQuery
from dcp_decode.kernels.sparse_arguments import QUERY_STAGED, QUERY_WARPS_DONE, SparseArguments, Worker
from dcp_decode.kernels.sparse_query import ROW_PIECES
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig
from dcp_decode.kernels.warpgroup_shared import QUERY_BLOCKS

BLOCK_PIECES = ROW_PIECES // QUERY_BLOCKS  # pieces of E4M3 that fill a swizzled row
PAIR_PIECES = 2 * BLOCK_PIECES


class WarpgroupQuery(PolledQuery):
    """The query warps of `SparseWarpgroups`."""

    config: WarpgroupConfig
    pieces_in_flight = 8  # of a thread

    def piece(self, turn: int, thread: Any) -> Any:
        """Number of a query thread's piece: eight threads share a block of two heads; clamped to the last."""
        place = ptx.minimum_int32(thread + turn * self.config.query_threads, Int32(self.pieces - 1))
        unit, within = place // PAIR_PIECES, place % PAIR_PIECES
        head = unit // QUERY_BLOCKS * 2 + within // BLOCK_PIECES
        return head * ROW_PIECES + unit % QUERY_BLOCKS * BLOCK_PIECES + within % BLOCK_PIECES

    def stage_words(self, words: list[Any], line: Any, first_word: Any, worker: Worker) -> None:
        """A piece of a head as two swizzled 16-byte pieces of f16."""
        piece = first_word // 4
        layout = self.config.shared
        block = worker.shared + layout.query + piece // BLOCK_PIECES * layout.block_bytes
        first = piece % BLOCK_PIECES * 2
        unpacked = [ptx.e4m3_to_f16(word) for word in words]
        ptx.store_shared(block + wgmma.swizzled(line, first), [low for low, _ in unpacked])
        ptx.store_shared(block + wgmma.swizzled(line, first + 1), [high for _, high in unpacked])

    @cute.jit
    def serve_query(self, arguments: SparseArguments, worker: Worker) -> None:
        """The query warps, from the first load to the fence; also for rows of count 0."""
        address = self.receive_and_publish(arguments, worker)
        # The tensor cores read what these threads have stored.
        ptx.fence_async_shared()
        cute.arch.barrier_arrive(barrier_id=QUERY_STAGED, number_of_threads=self.config.staged_threads)
        self.await_peers()
        self.arrive_at_peers()
        cute.arch.barrier(barrier_id=QUERY_WARPS_DONE, number_of_threads=self.config.query_threads)
        self.await_peers()
        self.release_query(worker, address)

    def arrive_at_peers(self) -> None:
        """The cluster barrier, first: this CTA's mbarriers are initialised; then: it has its query words."""
        if self.config.clustered:
            cute.arch.cluster_arrive_relaxed()

    def await_peers(self) -> None:
        """All CTAs of the cluster have arrived."""
        if self.config.clustered:
            cute.arch.cluster_wait()
