"""Values of the warpgroup decode: O^T = V^T P^T by wgmma, and the statistics of its rows.

A tile is 64 latent columns (M), two of them a warpgroup; N is the CTA's n heads, K the keys. V^T goes from the E4M3 key
rows to f16 in registers: a word of ldmatrix.trans holds columns c, c + 1 (c = 2 g of the warp's 16) of keys 2 q and
2 q + 1; a byte permutation and one conversion make (column c; both keys), (column c + 1; both keys). Row g of the
product is column 2 g and row g + 8 is column 2 g + 1: a lane's sums of a head are adjacent columns.

A batch is 32 keys. V of keys past the count is 0 up to its end (`clear_missing`): P is 0 there, but 0 x NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode.kernels import memory, ptx, wgmma
from dcp_decode.kernels.sparse_arguments import Worker
from dcp_decode.kernels.sparse_shared import ROW_PITCH
from dcp_decode.kernels.warpgroup_config import COMPUTE_WARPS
from dcp_decode.kernels.warpgroup_scores import WarpgroupScores

COLUMN_TILES = 2  # of a warpgroup
TILE_COLUMNS = 64
WARP_COLUMNS = 16
VALUE_STEP = 32  # keys of a batch
STEP_WORDS = 4  # of a column tile
PIECE_BYTES = 16  # of a row, that a lane stores


def value_operands(words: list[Any]) -> list[list[Any]]:
    """f16 left operands of two wgmma of ldmatrix.trans words (32 keys x 16 columns)."""
    pairs = [ptx.e4m3_to_f16(ptx.permute_bytes(word, word, 0x3120)) for word in words]
    return [[*pairs[first], *pairs[first + 1]] for first in (0, 2)]


class WarpgroupValues(WarpgroupScores):
    """Values and statistics of `SparseWarpgroups`."""

    @cute.jit
    def clear_missing(self, left: Int32, worker: Worker) -> None:
        """V of the keys past the `left` ones of the chunk: stale bytes become 0 up to the batch's end, a warp a key.

        All warps have read their scores' keys.
        """
        padded = ptx.minimum_int32((left + (VALUE_STEP - 1)) & -VALUE_STEP, Int32(self.config.chunk))
        place = worker.shared + self.config.shared.keys + worker.lane * PIECE_BYTES
        for key in cutlass.range(left + worker.warp, padded, COMPUTE_WARPS, unroll=1):
            memory.store_shared(place + key * ROW_PITCH, [Uint32(0)] * 4)

    @cute.jit
    def values(self, accumulators: cute.Tensor, left: Int32, worker: Worker) -> None:
        """accumulators += V^T P^T over the chunk, of which `left` keys are the row's.

        accumulators: [2 tiles][n / 2] FP32 of this warpgroup's columns.
        """
        layout = self.config.shared
        half = self.config.head_rows // 2
        steps = (ptx.minimum_int32(left, Int32(self.config.chunk)) + (VALUE_STEP - 1)) // VALUE_STEP
        place = self.value_place(worker)
        right = wgmma.descriptor(worker.shared + layout.probabilities)
        words = cute.make_rmem_tensor(COLUMN_TILES * STEP_WORDS, Uint32)
        self.load_values(words, place)
        for step in cutlass.range(steps, unroll=1):
            left_operands = [
                value_operands([words[tile * STEP_WORDS + word] for word in range(STEP_WORDS)])
                for tile in range(COLUMN_TILES)
            ]
            # The last step loads its words once more.
            following = ptx.minimum_int32(step + 1, steps - 1)
            self.load_values(words, place + following * (VALUE_STEP * ROW_PITCH))
            operand = right + Int64(self.probability_units(step))
            before = [[accumulators[tile * half + place] for place in range(half)] for tile in range(COLUMN_TILES)]
            after = wgmma.multiply_add(before, left_operands, operand, [0, wgmma.STEP_UNITS])
            for element in cutlass.range_constexpr(self.config.head_rows):
                accumulators[element] = after[element // half][element % half]

    def value_place(self, worker: Worker) -> Any:
        """A lane's ldmatrix address in V of the first 32 keys and its warp's columns of its first tile."""
        column = worker.warp // 4 * (COLUMN_TILES * TILE_COLUMNS) + worker.warp % 4 * WARP_COLUMNS
        return worker.shared + self.config.shared.keys + worker.lane * ROW_PITCH + column

    def probability_units(self, step: Any) -> Any:
        """Where P of a batch of 32 keys begins, in units of a descriptor: half a block of 64."""
        return step // 2 * (self.config.shared.block_bytes // wgmma.UNIT_BYTES) + step % 2 * (2 * wgmma.STEP_UNITS)

    def load_values(self, words: Any, place: Any) -> None:
        """ldmatrix.trans words of 32 keys and this warp's columns of its tiles."""
        for tile in range(COLUMN_TILES):
            loaded = memory.load_matrices(place + tile * TILE_COLUMNS, STEP_WORDS, transposed=True)
            for word in range(STEP_WORDS):
                words[tile * STEP_WORDS + word] = loaded[word]

    @cute.jit
    def rescale(self, accumulators: cute.Tensor, scale_log2: Float32, worker: Worker) -> None:
        """accumulators *= exp2(old max - new max) of their heads, once the maxima of a later chunk are known."""
        half = self.config.head_rows // 2
        place = self.previous_place(worker.lane % 4 * 2, worker)
        before = [value for octet in range(self.octets) for value in memory.load_shared(place + octet * 32, 2)]
        after = self.peaks(scale_log2, worker)
        factors = [ptx.exp2(ptx.add(old, -new)) for old, new in zip(before, after, strict=True)]
        for element in cutlass.range_constexpr(self.config.head_rows):
            factor = factors[element % half // 4 * 2 + element % 2]
            accumulators[element] = ptx.multiply(accumulators[element], factor)

    def previous_place(self, head: Any, worker: Worker) -> Any:
        """Of a head's running maximum before the chunk, base 2."""
        return worker.shared + self.config.shared.maxima + self.config.head_rows * 4 + head * 4

    @cute.jit
    def count_chunk(self, statistics: cute.Tensor, scale_log2: Float32, worker: Worker) -> None:
        """One thread a head, after the chunk's P: its running (max, sum)."""
        if worker.thread < self.config.head_rows:
            parts = [
                memory.load_shared(self.sum_place(warp, worker.thread, worker), 1)[0]
                for warp in range(self.softmax_warps)
            ]
            total = parts[0]
            for part in parts[1:]:
                total = ptx.add(total, part)
            word = memory.load_shared(self.maximum_place(worker.thread, worker), 1, Int32)[0]
            largest = self.base2(word, scale_log2)
            rescale = ptx.exp2(ptx.add(statistics[0], -largest))
            statistics[1] = ptx.multiply_add(statistics[1], rescale, total)
            statistics[0] = largest

    @cute.jit
    def keep_maximum(self, statistics: cute.Tensor, worker: Worker) -> None:
        """The same threads, between two chunks: what `rescale` compares with."""
        if worker.thread < self.config.head_rows:
            memory.store_shared(self.previous_place(worker.thread, worker), [statistics[0]])

    @cute.jit
    def store_statistics(self, statistics: cute.Tensor, worker: Worker) -> None:
        """The same threads, after the last chunk: (max, sum) of this CTA."""
        if worker.thread < self.config.head_rows:
            place = worker.shared + self.config.shared.own_statistics + worker.thread * 8
            memory.store_shared(place, [statistics[0], statistics[1]])
