"""The query of the warpgroup decode: polled by the query warps, unpacked to f16, the right operand of the scores.

A piece is 16 E4M3 bytes of a head. The keys' bytes reach the tensor cores in the order in which ldmatrix delivers them,
so the query takes the same one: of a 16-byte piece, b0 b1 b4 b5 b8 b9 b12 b13 are the first 16 bytes of f16 and
b2 b3 b6 b7 b10 b11 b14 b15 the next. Eight threads take four pieces of two heads: their stores meet no bank conflict.

A thread loads all its pieces, at most nine, before it waits for any, and then polls all that it misses together. Turn
after turn it has the same place in the next blocks of the query: one address serves all loads (with an address for each
of them 32 heads spilled or took two latencies).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode.kernels import memory, polling, ptx, wgmma
from dcp_decode.kernels.sparse_arguments import QUERY_STAGED, QUERY_WARPS_DONE, SparseArguments, Worker
from dcp_decode.kernels.sparse_query import PIECE_BYTES, ROW_PIECES, SparseQuery
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig
from dcp_decode.kernels.warpgroup_shared import QUERY_BLOCKS
from dcp_decode.mailbox import Stage

BLOCK_PIECES = ROW_PIECES // QUERY_BLOCKS  # pieces of E4M3 that fill a swizzled row
QUERY_ASKED = 4  # named barrier: the loads of the query words are under way


class WarpgroupQuery(SparseQuery):
    """The query warps of `SparseWarpgroups`."""

    config: WarpgroupConfig
    arrive_at_peers: Callable[[], None]
    await_peers: Callable[[], None]

    @property
    def block_pieces(self) -> int:
        """Pieces of a block of all the CTA's heads."""
        return BLOCK_PIECES * self.config.head_rows

    @property
    def turn_blocks(self) -> int:
        """Blocks that the query threads take at once."""
        return self.config.query_threads // self.block_pieces

    @property
    def query_turns(self) -> int:
        """Pieces of a query thread."""
        return -(-QUERY_BLOCKS // self.turn_blocks)

    def place(self, turn: int, thread: Any) -> tuple[Any, Any]:
        """(line of the CTA's heads, piece of it) that a query thread takes in a turn; past the end, the last again."""
        # Unsigned: a floor division of signed numbers takes three times the instructions.
        number = Uint32(ptx.minimum_int32(thread, Int32(self.turn_blocks * self.block_pieces - 1)))
        block = Int32(number // self.block_pieces) + turn * self.turn_blocks
        if (turn + 1) * self.turn_blocks > QUERY_BLOCKS:
            block = ptx.minimum_int32(block, Int32(QUERY_BLOCKS - 1))
        return Int32(number % self.block_pieces // BLOCK_PIECES), block * BLOCK_PIECES + Int32(number % BLOCK_PIECES)

    def place_address(self, address: Any, turn: int, thread: Any) -> Any:
        """Address of a thread's piece, from that of the CTA's first."""
        whole = (turn + 1) * self.turn_blocks <= QUERY_BLOCKS
        line, piece = self.place(0 if whole else turn, thread)
        address = address + Int64(line * ROW_PIECES + piece) * PIECE_BYTES
        return address + Int64(turn * self.turn_blocks * BLOCK_PIECES * PIECE_BYTES) if whole else address

    @cute.jit
    def receive_query(self, arguments: SparseArguments, worker: Worker, use: Int32, address: Int64) -> None:
        """As `SparseQuery`'s, but all of a thread's pieces are polled together."""
        turns = self.query_turns
        addresses = [self.place_address(address, turn, worker.thread) for turn in range(turns)]
        words = cute.make_rmem_tensor(4 * turns, Uint32)
        for turn in cutlass.range_constexpr(turns):
            loaded = memory.load_words_system(addresses[turn])
            for element in cutlass.range_constexpr(4):
                words[4 * turn + element] = loaded[element]
        cute.arch.barrier_arrive(barrier_id=QUERY_ASKED, number_of_threads=self.config.staged_threads)
        waiter = polling.Waiter(arguments.region, arguments.rank, use, arguments.deadline)
        aborted = polling.wait_pieces(
            waiter, words, addresses, int(Stage.SPARSE), lambda turn: self.recorded_place(turn, worker)
        )
        if aborted != 0:
            memory.store_shared(worker.shared + self.config.shared.abort_flag, [Int32(1)])
        for turn in cutlass.range_constexpr(turns):
            self.stage_piece([words[4 * turn + element] for element in range(4)], turn, worker)

    def recorded_place(self, turn: int, worker: Worker) -> polling.Place:
        """What a piece is, for the record of a wait that expires."""
        line, piece = self.place(turn, worker.thread)
        head = worker.tile_group * self.config.head_rows + line
        source = head // self.config.geometry.owner_heads
        return polling.Place(source, worker.row, head, piece * (PIECE_BYTES // 4))

    def stage_piece(self, words: list[Any], turn: int, worker: Worker) -> None:
        """A thread's piece of a turn as two swizzled 16-byte pieces of f16."""
        line, piece = self.place(turn, worker.thread)
        piece = Uint32(piece)
        block = worker.shared + self.config.shared.query + Int32(piece // BLOCK_PIECES * self.config.shared.block_bytes)
        first = Int32(piece % BLOCK_PIECES * 2)
        unpacked = [ptx.e4m3_to_f16(word) for word in words]
        memory.store_shared(block + wgmma.swizzled(line, first), [low for low, _ in unpacked])
        memory.store_shared(block + wgmma.swizzled(line, first + 1), [high for _, high in unpacked])

    @cute.jit
    def serve_query(self, arguments: SparseArguments, worker: Worker) -> None:
        """The query warps, from the first load to the fence; also for rows of count 0."""
        address = self.receive_and_publish(arguments, worker)
        # The tensor cores read what these threads have stored.
        memory.fence_async_shared()
        cute.arch.barrier_arrive(barrier_id=QUERY_STAGED, number_of_threads=self.config.staged_threads)
        self.await_peers()
        self.arrive_at_peers()
        cute.arch.barrier(barrier_id=QUERY_WARPS_DONE, number_of_threads=self.config.query_threads)
        self.await_peers()
        self.release_query(worker, address)
