"""Query words of a CTA: a warp group that loads them, waits for them, stages them in shared memory and re-arms them.

Every CTA of a cluster reads all query rows of its head tiles; exactly one of them re-arms a word, after the cluster
barrier has shown that all of them have it. The checked word is the used word: it goes from the load's registers to
shared memory and is never read from the mailbox again.

A warp group of their own (128 threads) because every polling thread must execute `fence.acq_rel.sys` before it exits,
and that costs more than a microsecond: with all 512 threads polling it cost 1.35 us before the first chunk, 0.6 to
0.85 us before the wait for the peers' partials and 0.75 to 1.0 us at the end; here it runs beside the chunks, like
the re-arm. Wide CTAs that exchange partials need the registers for their accumulators: there all 512 threads poll
right after the dependency wait, and re-arm and fence at the end.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import arrival, memory, ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_shared import ROW_PITCH
from dcp_decode.mailbox import Stage

PIECE_BYTES = 16  # what one load or store of query words moves
ROW_PIECES = numerics.ROW_BYTES // PIECE_BYTES
PIECES_IN_FLIGHT = 14  # of a thread: 84 registers with their addresses


class SparseQuery:
    """The query side of a sparse decode; pieces of 16 bytes are dealt to the query threads round robin."""

    config: Any  # of any sparse decode (`sparse_layout.DecodeConfig`)

    @property
    def pieces(self) -> int:
        """16-byte pieces of the CTA's query rows (they are contiguous: heads of one mailbox row)."""
        return self.config.head_rows * ROW_PIECES

    def query_address(self, arguments: SparseArguments, worker: Worker, use: Any) -> Any:
        """Address of the first query byte of this CTA: query[use % G, row, tile_group * 16 t, 0]."""
        g = self.config.geometry
        line = (Int64(use % g.generations) * g.capacity + Int64(worker.row)) * g.padded_heads
        line += Int64(worker.tile_group * self.config.head_rows)
        return arguments.region + self.config.mailbox.query.offset + line * numerics.ROW_BYTES

    def piece(self, turn: int, thread: Any) -> Any:
        """Number of a query thread's piece: round robin, clamped to the last."""
        return ptx.minimum_int32(thread + turn * self.config.query_threads, Int32(self.pieces - 1))

    def counted_from(self, worker: Worker, warp: int) -> Worker:
        """The same thread, counted from the first one of that warp."""
        return worker._replace(thread=worker.thread - 32 * warp, warp=worker.warp - warp)

    @cute.jit
    def receive_and_publish(self, arguments: SparseArguments, worker: Worker) -> Int64:
        """A query thread up to its last poll; returns the address of the CTA's query words."""
        use = arrival.read_use(arguments.region, int(Stage.SPARSE))
        gave_up = arrival.read_abort(arguments.region)
        address = self.query_address(arguments, worker, use)
        self.receive_query(arguments, worker, use, address)
        self.publish_use(worker, use, gave_up)
        self.advance_query_use(arguments, worker)
        return address

    @cute.jit
    def receive_query(self, arguments: SparseArguments, worker: Worker, use: Int32, address: Int64) -> None:
        """Wait for every word of this thread's pieces and put them into shared memory; all pieces are loaded first.

        An expired or aborted wait raises the CTA's abort flag and leaves armed words behind; they are never pushed.
        """
        turns = -(-self.pieces // self.config.query_threads)
        in_flight = -(-turns // -(-turns // PIECES_IN_FLIGHT))
        for first in cutlass.range_constexpr(0, turns, in_flight):
            batch = range(first, min(first + in_flight, turns))
            places = [self.piece(turn, worker.thread) for turn in batch]
            loaded = [memory.load_words_system(address + Int64(place) * PIECE_BYTES) for place in places]
            for words, place in zip(loaded, places, strict=True):
                self.receive_piece(words, place, arguments, worker, use, address)

    @cute.jit
    def receive_piece(
        self, words: Any, piece: Int32, arguments: SparseArguments, worker: Worker, use: Int32, address: Int64
    ) -> None:
        four = cute.make_rmem_tensor(4, Uint32)
        for element in cutlass.range_constexpr(4):
            four[element] = words[element]
        line = piece // ROW_PIECES
        head = worker.tile_group * self.config.head_rows + line
        first_word = (piece - line * ROW_PIECES) * 4
        aborted = arrival.wait_words(
            four,
            address + Int64(piece) * PIECE_BYTES,
            arguments.region,
            arguments.rank,
            use,
            arguments.deadline,
            int(Stage.SPARSE),
            head // self.config.geometry.owner_heads,
            worker.row,
            head,
            first_word,
        )
        if aborted != 0:
            memory.store_shared(worker.shared + self.config.shared.abort_flag, [Int32(1)])
        self.stage_words([four[0], four[1], four[2], four[3]], line, first_word, worker)

    def stage_words(self, words: list[Any], line: Any, first_word: Any, worker: Worker) -> None:
        """Put a piece of a head's query, 16 E4M3 bytes, where the scores find it."""
        memory.store_shared(worker.shared + self.config.shared.query + line * ROW_PITCH + first_word * 4, words)

    @cute.jit
    def publish_use(self, worker: Worker, use: Int32, gave_up: Int32) -> None:
        """One query thread tells the compute warps the use number, and whether an earlier kernel gave up.

        Words that an aborted use did not re-arm look arrived when their generation comes round again: no push then.
        """
        if worker.thread == 0:
            memory.store_shared(worker.shared + self.config.shared.use_number, [use])
            if gave_up != 0:
                memory.store_shared(worker.shared + self.config.shared.abort_flag, [Int32(1)])

    @cute.jit
    def rearm_query(self, worker: Worker, address: Int64) -> None:
        """Arm this CTA's share of the words; the caller has passed the cluster barrier after the last reader."""
        share = self.pieces // self.config.split
        query_threads = self.config.query_threads
        armed = Uint32(numerics.ARMED_WORD & 0xFFFFFFFF)
        for turn in cutlass.range_constexpr(-(-share // query_threads)):
            within = worker.thread + turn * query_threads
            if within < share:
                piece = worker.split * share + within
                memory.store_words_system(address + Int64(piece) * PIECE_BYTES, [armed, armed, armed, armed])

    @cute.jit
    def release_query(self, worker: Worker, address: Int64) -> None:
        """Re-arm and fence, after the cluster barrier; an aborted CTA leaves the words for the post-mortem."""
        aborted = memory.load_shared(worker.shared + self.config.shared.abort_flag, 1, Int32)[0]
        if aborted == 0:
            self.rearm_query(worker, address)
        # Acquire side of the query exchange: orders the words that this thread read, and through the fence that their
        # writers executed before pushing all those writers did before (their re-arms), before this rank's next pushes.
        cute.arch.fence_acq_rel_sys()

    @cute.jit
    def advance_query_use(self, arguments: SparseArguments, worker: Worker) -> None:
        """One thread of the grid: the query stage has completed (dependency wait), so its use is over."""
        if (worker.thread == 0) & (worker.split == 0) & (worker.tile_group == 0) & (worker.row == 0):
            arrival.advance_use(arguments.region, int(Stage.QUERY))
