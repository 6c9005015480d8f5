"""Query words of a CTA: a warp group that loads them, waits for them, stages them in shared memory and re-arms them.

Every CTA of a cluster reads all query rows of its head tiles; exactly one of them re-arms a word, after the cluster
barrier has shown that all four have it. The checked word is the used word: it goes from the load's registers to shared
memory and is never read from the mailbox again.

A warp group of their own (128 threads) because every polling thread must execute `fence.acq_rel.sys` before it exits,
and that costs more than a microsecond: with all 512 threads polling it cost 1.35 us before the first chunk, 0.6 to
0.85 us before the wait for the peers' partials and 0.75 to 1.0 us at the end; here it runs beside the chunks, like
the re-arm. Wide CTAs (tiles > 1) need the registers for their accumulators: there all 512 threads poll right after
the dependency wait, and re-arm and fence at the end.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import arrival, ptx
from dcp_decode.kernels.sparse_config import ROW_PITCH, SPLIT, SparseConfig
from dcp_decode.mailbox import Stage

PIECE_BYTES = 16  # what one load or store of query words moves
ROW_PIECES = numerics.ROW_BYTES // PIECE_BYTES


class SparseQuery:
    """The query side of `SparseDcpDecode`; pieces of 16 bytes are dealt to the query threads round robin."""

    config: SparseConfig

    @property
    def pieces(self) -> int:
        """16-byte pieces of the CTA's query rows (they are contiguous: heads of one mailbox row)."""
        return self.config.head_rows * ROW_PIECES

    @cute.jit
    def query_address(self, region: Int64, use: Int32, row: Int32, tile_group: Int32) -> Int64:
        """Address of the first query byte of this CTA: query[use % G, row, tile_group * 16 t, 0]."""
        g = self.config.geometry
        line = (Int64(use % g.generations) * g.capacity + Int64(row)) * g.padded_heads
        line += Int64(tile_group * self.config.head_rows)
        return region + self.config.mailbox.query.offset + line * numerics.ROW_BYTES

    def piece(self, turn: int, thread: Any) -> Any:
        """Number of a query thread's piece: round robin, clamped to the last."""
        return ptx.minimum_int32(thread + turn * self.config.query_threads, Int32(self.pieces - 1))

    @cute.jit
    def receive_query(
        self,
        address: Int64,
        region: Int64,
        rank: Int32,
        use: Int32,
        deadline: Int64,
        row: Int32,
        tile_group: Int32,
        thread: Int32,
        shared: Int32,
    ) -> None:
        """Wait for every word of this thread's pieces and put them into shared memory; `thread` counts query threads.

        An expired or aborted wait raises the CTA's abort flag and leaves armed words behind; they are never pushed.
        """
        turns = (self.pieces + self.config.query_threads - 1) // self.config.query_threads
        self.receive_pieces(range(turns), address, region, rank, use, deadline, row, tile_group, thread, shared)

    @cute.jit
    def receive_pieces(
        self,
        turns: cutlass.Constexpr,
        address: Int64,
        region: Int64,
        rank: Int32,
        use: Int32,
        deadline: Int64,
        row: Int32,
        tile_group: Int32,
        thread: Int32,
        shared: Int32,
    ) -> None:
        """Load all pieces of these turns, then wait for and stage one after the other."""
        loaded = [ptx.load_words_system(address + Int64(self.piece(turn, thread)) * PIECE_BYTES) for turn in turns]
        for turn, words in zip(turns, loaded, strict=True):
            self.receive_piece(
                words, self.piece(turn, thread), address, region, rank, use, deadline, row, tile_group, shared
            )

    @cute.jit
    def receive_piece(
        self,
        words: Any,
        piece: Int32,
        address: Int64,
        region: Int64,
        rank: Int32,
        use: Int32,
        deadline: Int64,
        row: Int32,
        tile_group: Int32,
        shared: Int32,
    ) -> None:
        four = cute.make_rmem_tensor(4, Uint32)
        for element in cutlass.range_constexpr(4):
            four[element] = words[element]
        line = piece // ROW_PIECES
        head = tile_group * self.config.head_rows + line
        first_word = (piece - line * ROW_PIECES) * 4
        aborted = arrival.wait_words(
            four,
            address + Int64(piece) * PIECE_BYTES,
            region,
            rank,
            use,
            deadline,
            int(Stage.SPARSE),
            head // self.config.geometry.owner_heads,
            row,
            head,
            first_word,
        )
        if aborted != 0:
            ptx.store_shared(shared + self.config.shared.abort_flag, [Int32(1)])
        place = shared + self.config.shared.query + line * ROW_PITCH + first_word * 4
        ptx.store_shared(place, [four[0], four[1], four[2], four[3]])

    @cute.jit
    def rearm_query(self, address: Int64, split: Int32, thread: Int32) -> None:
        """Arm this CTA's quarter of the words; the caller has passed the cluster barrier after the last reader."""
        share = self.pieces // SPLIT
        query_threads = self.config.query_threads
        armed = Uint32(numerics.ARMED_WORD & 0xFFFFFFFF)
        for turn in cutlass.range_constexpr((share + query_threads - 1) // query_threads):
            within = thread + turn * query_threads
            if within < share:
                piece = split * share + within
                ptx.store_words_system(address + Int64(piece) * PIECE_BYTES, [armed, armed, armed, armed])

    @cute.jit
    def release_query(self, address: Int64, split: Int32, thread: Int32, shared: Int32) -> None:
        """Re-arm and fence, after the cluster barrier; an aborted CTA leaves the words for the post-mortem."""
        aborted = ptx.load_shared(shared + self.config.shared.abort_flag, 1, Int32)[0]
        if aborted == 0:
            self.rearm_query(address, split, thread)
        # Acquire side of the query exchange: orders the words that this thread read, and through the fence that their
        # writers executed before pushing all those writers did before (their re-arms), before this rank's next pushes.
        cute.arch.fence_acq_rel_sys()

    @cute.jit
    def advance_query_use(self, region: Int64, split: Int32, tile_group: Int32, row: Int32, thread: Int32) -> None:
        """One thread of the grid: the query stage has completed (dependency wait), so its use is over."""
        if (thread == 0) & (split == 0) & (tile_group == 0) & (row == 0):
            arrival.advance_use(region, int(Stage.QUERY))
