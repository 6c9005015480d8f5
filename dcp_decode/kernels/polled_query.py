"""A query side whose threads poll all the pieces that they miss together: for words that come while they are polled."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode.kernels import polling, ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_query import PIECE_BYTES, ROW_PIECES, SparseQuery
from dcp_decode.mailbox import Stage


class PolledQuery(SparseQuery):
    """`SparseQuery` with one wait for all pieces in flight instead of one after the other."""

    @cute.jit
    def receive_query(self, arguments: SparseArguments, worker: Worker, use: Int32, address: Int64) -> None:
        """As `SparseQuery`'s, but all of a thread's pieces in flight are polled together."""
        turns = -(-self.pieces // self.config.query_threads)
        in_flight = -(-turns // -(-turns // self.pieces_in_flight))
        waiter = polling.Waiter(arguments.region, arguments.rank, use, arguments.deadline)
        for first in cutlass.range_constexpr(0, turns, in_flight):
            pieces = [self.piece(turn, worker.thread) for turn in range(first, min(first + in_flight, turns))]
            self.receive_pieces(pieces, waiter, worker, address)

    @cute.jit
    def receive_pieces(self, pieces: list[Any], waiter: polling.Waiter, worker: Worker, address: Int64) -> None:
        """Load all of these pieces, wait for what has not come, and stage them."""
        addresses = [address + Int64(piece) * PIECE_BYTES for piece in pieces]
        words = cute.make_rmem_tensor(4 * len(pieces), Uint32)
        for turn in cutlass.range_constexpr(len(pieces)):
            loaded = ptx.load_words_system(addresses[turn])
            for element in cutlass.range_constexpr(4):
                words[4 * turn + element] = loaded[element]
        aborted = polling.wait_pieces(
            waiter, words, addresses, int(Stage.SPARSE), lambda turn: self.piece_place(pieces[turn], worker)
        )
        if aborted != 0:
            ptx.store_shared(worker.shared + self.config.shared.abort_flag, [Int32(1)])
        for turn in cutlass.range_constexpr(len(pieces)):
            line = pieces[turn] // ROW_PIECES
            first_word = (pieces[turn] - line * ROW_PIECES) * (PIECE_BYTES // 4)
            self.stage_words([words[4 * turn + element] for element in range(4)], line, first_word, worker)

    def piece_place(self, piece: Any, worker: Worker) -> polling.Place:
        """What a piece is, for the record of a wait that expires."""
        line = piece // ROW_PIECES
        head = worker.tile_group * self.config.head_rows + line
        first_word = (piece - line * ROW_PIECES) * (PIECE_BYTES // 4)
        return polling.Place(head // self.config.geometry.owner_heads, worker.row, head, first_word)
