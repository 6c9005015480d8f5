"""Query words of a CTA: early loads, bounded arrival, staging in shared memory, re-arming.

Every CTA of a cluster reads all query rows of its head tile; exactly one of them re-arms a word, after the cluster
barrier has shown that all four have it. The checked word is the used word: it goes from the load's registers to shared
memory and is never read from the mailbox again.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import arrival, ptx
from dcp_decode.kernels.sparse_config import ROW_PITCH, SPLIT, THREADS, SparseConfig
from dcp_decode.mailbox import Stage

PIECE_BYTES = 16  # what one load or store of query words moves
ROW_PIECES = numerics.ROW_BYTES // PIECE_BYTES


class SparseQuery:
    """The query side of `SparseDcpDecode`; pieces of 16 bytes are dealt to threads round robin."""

    config: SparseConfig

    @property
    def pieces(self) -> int:
        """16-byte pieces of the CTA's query rows (they are contiguous: heads of one mailbox row)."""
        return self.config.head_rows * ROW_PIECES

    @property
    def piece_rounds(self) -> int:
        return (self.pieces + THREADS - 1) // THREADS

    @cute.jit
    def query_address(self, region: Int64, use: Int32, row: Int32, tile: Int32) -> Int64:
        """Address of the first query byte of this CTA: query[use % G, row, tile * 16 t, 0]."""
        g = self.config.geometry
        generation = use % g.generations
        line = (Int64(generation) * g.capacity + Int64(row)) * g.padded_heads + Int64(tile * self.config.head_rows)
        return region + self.config.mailbox.query.offset + line * numerics.ROW_BYTES

    @cute.jit
    def load_query(self, address: Int64, thread: Int32) -> cute.Tensor:
        """First loads of this thread's pieces, (rounds, 4) words, issued long before they are needed."""
        words = cute.make_rmem_tensor(4 * self.piece_rounds, Uint32)
        for index in cutlass.range_constexpr(4 * self.piece_rounds):
            words[index] = Uint32(0)
        for turn in cutlass.range_constexpr(self.piece_rounds):
            piece = thread + turn * THREADS
            if piece < self.pieces:
                loaded = ptx.load_words_system(address + Int64(piece) * PIECE_BYTES)
                for element in cutlass.range_constexpr(4):
                    words[4 * turn + element] = loaded[element]
        return words

    @cute.jit
    def receive_query(
        self,
        words: cute.Tensor,
        address: Int64,
        region: Int64,
        rank: Int32,
        use: Int32,
        deadline: Int64,
        row: Int32,
        tile: Int32,
        thread: Int32,
        shared: Int32,
    ) -> None:
        """Wait for every word of this thread's pieces and put them into shared memory.

        An expired or aborted wait raises the CTA's abort flag and leaves armed words behind; they are never pushed.
        """
        g = self.config.geometry
        for turn in cutlass.range_constexpr(self.piece_rounds):
            piece = thread + turn * THREADS
            if piece < self.pieces:
                four = cute.make_rmem_tensor(4, Uint32)
                for element in cutlass.range_constexpr(4):
                    four[element] = words[4 * turn + element]
                line = piece // ROW_PIECES
                head = tile * self.config.head_rows + line
                first_word = (piece - line * ROW_PIECES) * 4
                aborted = arrival.wait_words(
                    four,
                    address + Int64(piece) * PIECE_BYTES,
                    region,
                    rank,
                    use,
                    deadline,
                    int(Stage.SPARSE),
                    head // g.owner_heads,
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
        share = (self.pieces + SPLIT - 1) // SPLIT
        armed = Uint32(numerics.ARMED_WORD & 0xFFFFFFFF)
        for turn in cutlass.range_constexpr((share + THREADS - 1) // THREADS):
            within = thread + turn * THREADS
            piece = split * share + within
            if (within < share) & (piece < self.pieces):
                ptx.store_words_system(address + Int64(piece) * PIECE_BYTES, [armed, armed, armed, armed])
