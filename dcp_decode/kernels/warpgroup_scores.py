"""Scores and probabilities of a chunk of the warpgroup decode: S^T = K Q^T by wgmma, softmax over the chunk's keys.

A tile is 64 keys (M), warp i of a warpgroup has its keys 16 i .. + 15; N is the CTA's n heads. The keys go from their
E4M3 rows to f16 in registers, exactly; the query lies in shared memory (`warpgroup_query`).

    chunk of 256 keys    a tile a warpgroup
             128         two warpgroups a tile: of every block of 64 numbers the first half and the second
              64         four: a quarter each; their partial scores are summed through shared memory, in order

A thread has the scores of keys g, g + 8 with heads 8 j + 2 q, + 1 (g = lane / 4, q = lane % 4). Its P, packed in pairs
of heads, is what stmatrix.trans turns into rows of heads: the right operand of the values.

    max over the keys    registers -> shuffles -> red.shared.max on `maxima` -> barrier -> registers
    sum of P             registers -> shuffles -> a word a warp and head in the pads of the key rows

Keys past the count get the score -inf and so P = 0; a NaN score makes the sum NaN, whatever becomes of the maximum.
"""

from __future__ import annotations

import math
from typing import Any

from cutlass import Float32, Int32, cute

from dcp_decode import numerics
from dcp_decode.kernels import memory, ptx, wgmma
from dcp_decode.kernels.sparse_arguments import Worker
from dcp_decode.kernels.sparse_chunk import query_operand
from dcp_decode.kernels.sparse_shared import ROW_PITCH
from dcp_decode.kernels.warpgroup_config import COMPUTE_WARPS, WarpgroupConfig
from dcp_decode.kernels.warpgroup_shared import KEY_TILE, QUERY_BLOCKS

COMPUTE_THREADS = 32 * COMPUTE_WARPS
STEP_BYTES = 16  # of a key in one wgmma
BLOCK_STEPS = 4  # wgmma of a block of 64 numbers
WARP_KEYS = 16
SUM_WORDS = (ROW_PITCH - numerics.ROW_BYTES) // 4  # in the pad of a key row
EMPTY = -math.inf


class WarpgroupScores:
    """Scores and softmax of `SparseWarpgroups`."""

    config: WarpgroupConfig

    @property
    def octets(self) -> int:
        """Groups of eight heads of a CTA."""
        return self.config.head_rows // 8

    @property
    def softmax_warps(self) -> int:
        """Warps that have a tile's scores in the end: the first ones."""
        return 4 * self.config.shared.tiles

    def tile_of(self, worker: Worker) -> Any:
        """The tile whose scores this warp computes."""
        return worker.warp // 4 % self.config.shared.tiles

    def warp_key(self, worker: Worker) -> Any:
        """The first of the 16 keys of a chunk whose scores this warp computes."""
        return self.tile_of(worker) * KEY_TILE + worker.warp % 4 * WARP_KEYS

    def scores(self, worker: Worker) -> list[Any]:
        """n / 2 scores of a lane: of its tile's keys g, g + 8 of the warp, over its depth's part of the 576 numbers."""
        layout = self.config.shared
        depth_steps = BLOCK_STEPS // layout.depths
        depth = worker.warp // (4 * layout.tiles)
        steps = depth_steps * QUERY_BLOCKS
        batch = self.score_batch
        key = self.warp_key(worker) + worker.lane % 16
        # ldmatrix takes two steps; where a depth has one step a block, the second is in the next block.
        step_bytes = STEP_BYTES if depth_steps > 1 else wgmma.BLOCK
        place = worker.shared + layout.keys + key * ROW_PITCH + depth * (depth_steps * STEP_BYTES)
        place = place + worker.lane // 16 * step_bytes
        right = wgmma.descriptor(worker.shared + layout.query + depth * (depth_steps * wgmma.STEP * 2))
        sums = [Float32(0.0)] * (self.config.head_rows // 2)
        words = self.load_keys(place, 0, min(batch, steps), depth_steps)
        for first in range(0, steps, batch):
            count = min(batch, steps - first)
            left = [query_operand(*words[2 * step : 2 * step + 2]) for step in range(count)]
            following = first + count
            if following < steps:
                words = self.load_keys(place, following, min(batch, steps - following), depth_steps)
            offsets = [self.step_units(step, depth_steps) for step in range(first, first + count)]
            (sums,) = wgmma.multiply_add([sums], [left], right, offsets)
        return sums

    def held(self, scores: Any) -> list[Any]:
        """A lane's n / 2 scores out of registers that live across conditions."""
        return [scores[place] for place in range(self.config.head_rows // 2)]

    def hold(self, scores: Any, values: list[Any]) -> None:
        """Replace them."""
        for place, value in enumerate(values):
            scores[place] = value

    @property
    def score_batch(self) -> int:
        """wgmma of a batch; even: ldmatrix loads the keys of two."""
        return 4

    def step_units(self, step: int, depth_steps: int) -> int:
        """Where a depth's step begins in the query, in units of a descriptor."""
        block, within = divmod(step, depth_steps)
        return block * self.config.shared.block_bytes // wgmma.UNIT_BYTES + within * wgmma.STEP_UNITS

    def load_keys(self, place: Any, first: int, count: int, depth_steps: int) -> list[Any]:
        """ldmatrix words [2 count] of steps `first` .. of a depth: keys g, then g + 8."""
        words: list[Any] = []
        for step in range(first, first + count, 2):
            block, within = divmod(step, depth_steps)
            matrices = 4 if step + 1 < first + count else 2
            words += memory.load_matrices(place + block * wgmma.BLOCK + within * STEP_BYTES, matrices)
        return words

    def store_partial(self, scores: list[Any], worker: Worker) -> None:
        """Partial scores of a depth but the first, as they lie in the lanes."""
        place = self.partial_place(worker.warp // self.softmax_warps - 1, worker)
        for first in range(0, len(scores), 4):
            memory.store_shared(place + first * 128, scores[first : first + 4])

    def add_partials(self, scores: list[Any], worker: Worker) -> list[Any]:
        """The scores of the first depth and the others', in order."""
        scores = list(scores)
        for depth in range(1, self.config.shared.depths):
            place = self.partial_place(depth - 1, worker)
            for first in range(0, len(scores), 4):
                parts = memory.load_shared(place + first * 128, 4)
                scores[first : first + 4] = [
                    ptx.add(score, part) for score, part in zip(scores[first : first + 4], parts, strict=True)
                ]
        return scores

    def partial_place(self, slot: Any, worker: Worker) -> Any:
        """A lane's place in the partial scores of a depth."""
        warp = slot * self.softmax_warps + worker.warp % self.softmax_warps
        return worker.shared + self.config.shared.scores + warp * (self.config.head_rows * 64) + worker.lane * 16

    def maximum_place(self, head: Any, worker: Worker) -> Any:
        """Of the largest score so far of one of the CTA's heads, as an ordered integer."""
        return worker.shared + self.config.shared.maxima + head * 4

    def base2(self, word: Any, scale_log2: Any) -> Any:
        """A maximum out of shared memory as a logit."""
        return ptx.multiply(ptx.bits_float(ptx.ordered(word)), scale_log2)

    def peaks(self, scale_log2: Any, worker: Worker) -> list[Any]:
        """The running maxima of a lane's heads [n / 4], base 2: heads 2 q, 2 q + 1 of every eight."""
        place = self.maximum_place(worker.lane % 4 * 2, worker)
        words = [memory.load_shared(place + octet * 32, 2, Int32) for octet in range(self.octets)]
        return [self.base2(word, scale_log2) for pair in words for word in pair]

    def mask_scores(self, scores: list[Any], left: Any, worker: Worker) -> list[Any]:
        """-inf for keys past the `left` ones of the chunk."""
        key = self.warp_key(worker) + worker.lane // 4
        return [
            ptx.select_less(key + place % 4 // 2 * 8, left, score, Float32(EMPTY)) for place, score in enumerate(scores)
        ]

    @cute.jit
    def raise_maxima(self, scores: list[Any], worker: Worker) -> None:
        """This warp's maxima into those of the row."""
        largest, first, copies = wgmma.reduce_rows(self.over_keys(scores, ptx.maximum), worker.lane, ptx.maximum)
        if copies == 0:
            for place, value in enumerate(largest):
                address = self.maximum_place(self.head_of(first + place, worker), worker)
                wgmma.raise_maximum(address, ptx.ordered(ptx.float_bits(value)))

    def over_keys(self, values: list[Any], combine: Any) -> list[Any]:
        """A lane's two keys combined: [n / 4], heads 2 q, 2 q + 1 of every eight."""
        return [combine(values[place], values[place + 2]) for place in range(len(values)) if place % 4 < 2]

    def head_of(self, value: Any, worker: Worker) -> Any:
        """Head (of the CTA's) of a lane's value number `value` of `over_keys`."""
        return value // 2 * 8 + worker.lane % 4 * 2 + value % 2

    @cute.jit
    def probabilities(self, scores: list[Any], peaks: list[Any], scale_log2: Any, worker: Worker) -> None:
        """P of this warp's keys into shared memory, E4M3 values as f16, and their sums before rounding."""
        anchors = [ptx.add(Float32(numerics.LOG2_E4M3_MAX), -peak) for peak in peaks]
        values = [
            ptx.exp2(ptx.multiply_add(score, scale_log2, anchors[place // 4 * 2 + place % 2]))
            for place, score in enumerate(scores)
        ]
        self.store_probabilities(values, worker)
        totals, first, copies = wgmma.reduce_rows(self.over_keys(values, ptx.add), worker.lane, ptx.add)
        if copies == 0:
            for number, total in enumerate(totals):
                memory.store_shared(self.sum_place(worker.warp, self.head_of(first + number, worker), worker), [total])

    def store_probabilities(self, values: list[Any], worker: Worker) -> None:
        """P of a lane's keys and heads, as `scores` has them, rounded to E4M3, as f16 rows of heads."""
        layout = self.config.shared
        words = [wgmma.rounded_pair(*values[place : place + 2]) for place in range(0, len(values), 2)]
        # Matrices (heads 8 j .. + 7) x (keys 0 .. 7, keys 8 .. 15 of the warp), of two j with one stmatrix.
        line = worker.lane // 16 * 8 + worker.lane % 8
        piece = worker.warp % 4 * 2 + worker.lane // 8 % 2
        place = worker.shared + layout.probabilities + self.tile_of(worker) * layout.block_bytes
        place = place + wgmma.swizzled(line, piece)
        for octet in range(0, self.octets, 2):
            wgmma.store_matrices(place + octet * (8 * wgmma.BLOCK_ROW_BYTES), words[2 * octet : 2 * octet + 4])

    def sum_place(self, warp: Any, head: Any, worker: Worker) -> Any:
        """Of a warp's sum of a head's P: in the pads of the warp's key rows."""
        row = warp * WARP_KEYS + head // SUM_WORDS
        pad = worker.shared + self.config.shared.keys + numerics.ROW_BYTES
        return pad + row * ROW_PITCH + head % SUM_WORDS * 4

    @cute.jit
    def store_softmax(self, scores: list[Any], scale_log2: Float32, worker: Worker) -> None:
        """P of masked scores into shared memory, once the maxima are complete."""
        self.probabilities(scores, self.peaks(scale_log2, worker), scale_log2, worker)
        # The tensor cores read P.
        memory.fence_async_shared()
