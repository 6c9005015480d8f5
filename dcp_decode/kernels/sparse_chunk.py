"""One chunk of up to 64 keys of a CTA: gather, scores, softmax, values.

How the 16 warps share the work (g = lane / 4, q = lane % 4; a tile is 16 query heads):

    gather   warp w, lane 0..3     rows 4 w + lane of the chunk, one 576-byte bulk copy each
    scores   warp w                keys 16 (w / 4) .. + 15 x bytes 144 (w % 4) .. + 143 x 16 heads, 9 steps of m16n8k16
    softmax  warp w                head w of each tile; lane: the two keys 16 (lane / 8) + lane % 8 and + 8
    values   warp w                latent columns 32 w .. + 31 x 64 keys x 16 heads, m16n8k16

E4M3 operands are unpacked to f16 (exact) because mma with E4M3 operands is emulated on all three architectures by the
same unpacking and two f16 mma; doing it here lets one tile keep its query fragments in registers for all chunks and
several tiles share the unpacked keys and values.

A score is the sum of four partial scores (the four depths, in order), each a chain of 9 mma over 16 bytes. Inside a
16-byte step the mma slots hold bytes in the order that ldmatrix delivers, the same for query and key.

P and V meet in this slot order (keys of a 32-key step, r = 2 q + odd is a lane's pair row):

    first mma    slots 2 q, 2 q + 1: keys 2 q, 2 q + 8        slots 2 q + 8, 2 q + 9: keys 2 q + 1, 2 q + 9
    second mma   the same + 16

which is what `transpose4` makes of four ldmatrix.trans words of V (byte 0 and 1: columns 2 g, 2 g + 1 of key 2 q; byte
2 and 3: of key 2 q + 1; word i: key block 8 i). P bytes are stored in that order: a lane of the softmax writes its two
keys as adjacent bytes and a lane of the values step reads its eight bytes of a 32-key step at once.

Keys past the count: their scores are replaced by -inf (P = 0), and their V bytes are zeroed up to the next 32-key step
because 0 x NaN of stale shared memory would be NaN. Later steps are skipped.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import ptx
from dcp_decode.kernels.sparse_config import (
    CHUNK,
    DEPTHS,
    PROBABILITY_PITCH,
    ROW_PITCH,
    SCORE_PITCH,
    SPLIT,
    WARPS,
    SparseConfig,
)

STEP_BYTES = 16  # bytes of a row in one mma step
DEPTH_STEPS = numerics.ROW_BYTES // STEP_BYTES // DEPTHS
GATHER_ROWS = CHUNK // WARPS  # rows a warp gathers
VALUE_STEP = 32  # keys of one transposed V step
HEADS = 16
EMPTY = -math.inf


def store_fp8_pair_shared(pointer: Any, low: Any, high: Any) -> None:
    """E4M3 (satfinite, nearest even) of FP32 `low`, `high` as two adjacent bytes of shared memory, `low` first."""
    ptx.store_shared_half(pointer, ptx.e4m3_pair(low, high))


def transpose4(words: list[Any]) -> list[Any]:
    """Bytes of four words -> four words of bytes: out[j] = (w0.j, w1.j, w2.j, w3.j), byte 0 the lowest."""
    low01 = ptx.permute_bytes(words[0], words[1], 0x5140)
    low23 = ptx.permute_bytes(words[2], words[3], 0x5140)
    high01 = ptx.permute_bytes(words[0], words[1], 0x7362)
    high23 = ptx.permute_bytes(words[2], words[3], 0x7362)
    return [
        ptx.permute_bytes(low01, low23, 0x5410),
        ptx.permute_bytes(low01, low23, 0x7632),
        ptx.permute_bytes(high01, high23, 0x5410),
        ptx.permute_bytes(high01, high23, 0x7632),
    ]


def query_operand(upper: Any, lower: Any) -> list[Any]:
    """f16 mma left operand (4 words) of the E4M3 words of heads g and g + 8."""
    upper_low, upper_high = ptx.e4m3_to_f16(upper)
    lower_low, lower_high = ptx.e4m3_to_f16(lower)
    return [upper_low, lower_low, upper_high, lower_high]


def load_query_operands(address: Any, step: int) -> list[list[Any]]:
    """Operands of steps `step` and, before the last, `step` + 1 at a lane's ldmatrix address."""
    words = ptx.load_matrices(address + step * STEP_BYTES, 4 if step + 1 < DEPTH_STEPS else 2)
    return [query_operand(words[pair], words[pair + 1]) for pair in range(0, len(words), 2)]


def load_key_operands(address: Any, step: int) -> list[list[list[Any]]]:
    """f16 mma right operands [steps][2 key octets] of steps `step` and, before the last, `step` + 1."""
    words = ptx.load_matrices(address + step * STEP_BYTES, 4 if step + 1 < DEPTH_STEPS else 2)
    unpacked = [ptx.e4m3_to_f16(word) for word in words]
    return [unpacked[pair : pair + 2] for pair in range(0, len(words), 2)]


def transposed_values(words: list[Any]) -> list[list[list[Any]]]:
    """f16 right operands [2 column parities][2 mma] of four ldmatrix.trans words (32 keys x 16 columns)."""
    columns = [ptx.e4m3_to_f16(word) for word in transpose4(words)]
    return [[[columns[parity][half], columns[2 + parity][half]] for half in range(2)] for parity in range(2)]


class SparseChunk:
    """Gather, scores, softmax and values of `SparseDcpDecode`; accumulators are registers of the caller."""

    config: SparseConfig

    @property
    def query_in_registers(self) -> bool:
        """One tile keeps its unpacked query for all chunks (36 registers); more tiles reload it from shared memory."""
        return self.config.tiles == 1

    @cute.jit
    def load_index(self, rows: Int64, row: Int32, split: Int32, chunk: Int32, warp: Int32, lane: Int32) -> Int32:
        """Flat cache row that this lane gathers in `chunk` (lanes 0 .. 3; clamped, as it may precede the count)."""
        width = self.config.geometry.topk
        index = Int32(0)
        if lane < GATHER_ROWS:
            key = split + SPLIT * (chunk * CHUNK + warp * GATHER_ROWS + lane)
            place = Int64(row) * width + Int64(ptx.minimum_int32(key, Int32(width - 1)))
            index = ptx.load_global_int32(rows + place * 4)
        return index

    @cute.jit
    def gather(
        self,
        kv: Int64,
        index: Int32,
        chunk: Int32,
        keys: Int32,
        warp: Int32,
        lane: Int32,
        shared: Int32,
        barriers: cute.Pointer,
    ) -> None:
        """Start the copies of a chunk with `keys` keys left (at least one) and zero V up to its last 32-key step."""
        buffer = chunk % self.config.buffers
        count = ptx.minimum_int32(keys, Int32(CHUNK))
        base = shared + self.config.shared.keys + buffer * (CHUNK * ROW_PITCH)
        if (warp == 0) & (lane == 0):
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + (1 + buffer), count * numerics.ROW_BYTES)
        position = warp * GATHER_ROWS + lane
        if (lane < GATHER_ROWS) & (position < count):
            ptx.bulk_load(
                base + position * ROW_PITCH,
                kv + Int64(index) * numerics.ROW_BYTES,
                numerics.ROW_BYTES,
                shared + self.config.shared.key_barrier(0) + buffer * 8,
            )
        padded = (count + (VALUE_STEP - 1)) // VALUE_STEP * VALUE_STEP
        for turn in cutlass.range_constexpr(VALUE_STEP // WARPS):
            missing = count + warp + turn * WARPS
            if missing < padded:
                zero = Uint32(0)
                ptx.store_shared(base + missing * ROW_PITCH + lane * 16, [zero, zero, zero, zero])

    @cute.jit
    def scores(self, query: Any, base: Int32, warp: Int32, lane: Int32, shared: Int32) -> None:
        """Partial scores of this warp's keys and depth into shared memory; `query`: operands of one tile or None."""
        head_rows = self.config.head_rows
        depth = warp % DEPTHS
        group = warp // DEPTHS
        octet_row = (lane // 8) % 2 * 8 + lane % 8
        column = (depth * DEPTH_STEPS + lane // 16) * STEP_BYTES
        key_place = base + (group * 16 + octet_row) * ROW_PITCH + column
        sums = [[[Float32(0.0)] * 4, [Float32(0.0)] * 4] for _ in range(self.config.tiles)]
        # Steps outside, tiles inside: each pair of key operands serves all tiles and then dies.
        for first in cutlass.range_constexpr(0, DEPTH_STEPS, 2):
            keys = load_key_operands(key_place, first)
            for tile in cutlass.range_constexpr(self.config.tiles):
                if cutlass.const_expr(self.query_in_registers):
                    operands = query[first : first + 2]
                else:
                    operands = load_query_operands(self.query_place(tile, warp, lane, shared), first)
                for offset in cutlass.range_constexpr(len(operands)):
                    for octet in cutlass.range_constexpr(2):
                        sums[tile][octet] = ptx.mma_f16(operands[offset], keys[offset][octet], sums[tile][octet])
        for tile in cutlass.range_constexpr(self.config.tiles):
            upper = [sums[tile][octet][element] for element in (0, 1) for octet in range(2)]
            lower = [sums[tile][octet][element] for element in (2, 3) for octet in range(2)]
            # (head g, keys 2 q and 2 q + 8, then 2 q + 1 and 2 q + 9): what one softmax lane reads is adjacent.
            line = depth * head_rows + tile * HEADS + lane // 4
            place = shared + self.config.shared.scores + line * SCORE_PITCH + (group * 16 + lane % 4 * 4) * 4
            ptx.store_shared(place, upper)
            ptx.store_shared(place + 8 * SCORE_PITCH, lower)

    def query_place(self, tile: int, warp: Any, lane: Any, shared: Any) -> Any:
        """A lane's ldmatrix address of one tile's query for this warp's depth."""
        row = tile * HEADS + (lane // 8) % 2 * 8 + lane % 8
        column = (warp % DEPTHS * DEPTH_STEPS + lane // 16) * STEP_BYTES
        return shared + self.config.shared.query + row * ROW_PITCH + column

    def query_operands(self, warp: Any, lane: Any, shared: Any) -> list[list[Any]]:
        """All operands of a CTA of one tile for this warp's depth."""
        operands = []
        for step in range(0, DEPTH_STEPS, 2):
            operands += load_query_operands(self.query_place(0, warp, lane, shared), step)
        return operands

    @cute.jit
    def softmax(
        self,
        running_max: cute.Tensor,
        running_sum: cute.Tensor,
        keys: Int32,
        scale_log2: Float32,
        warp: Int32,
        lane: Int32,
        shared: Int32,
    ) -> None:
        """P of this warp's head of every tile, (tiles) running maxima and per-lane sums updated.

        A NaN score never enters the maximum but makes the lane's sum NaN, which no later chunk removes.
        """
        layout = self.config.shared
        head_rows = self.config.head_rows
        key = lane // 8 * 16 + lane % 8
        byte = lane // 16 * 32 + lane % 8 // 2 * 8 + lane // 8 % 2 * 4 + lane % 2 * 2
        for tile in cutlass.range_constexpr(self.config.tiles):
            line = tile * HEADS + warp
            place = shared + layout.scores + line * SCORE_PITCH + lane * 8
            pair = ptx.load_shared(place, 2)
            for depth in cutlass.range_constexpr(1, DEPTHS):
                part = ptx.load_shared(place + depth * head_rows * SCORE_PITCH, 2)
                pair = [ptx.add(pair[0], part[0]), ptx.add(pair[1], part[1])]
            logits = [
                ptx.select_less(key, keys, ptx.multiply(pair[0], scale_log2), Float32(EMPTY)),
                ptx.select_less(key + 8, keys, ptx.multiply(pair[1], scale_log2), Float32(EMPTY)),
            ]
            before = running_max[tile]
            largest = ptx.maximum(ptx.warp_maximum(ptx.maximum(logits[0], logits[1])), before)
            rescale = ptx.exp2(ptx.add(before, -largest))
            anchor = ptx.add(Float32(numerics.LOG2_E4M3_MAX), -largest)
            low = ptx.exp2(ptx.add(logits[0], anchor))
            high = ptx.exp2(ptx.add(logits[1], anchor))
            store_fp8_pair_shared(shared + layout.probabilities + line * PROBABILITY_PITCH + byte, low, high)
            running_max[tile] = largest
            running_sum[tile] = ptx.add(ptx.multiply_add(running_sum[tile], rescale, low), high)
            if lane == 0:
                ptx.store_shared(shared + layout.rescale + line * 4, [rescale])

    @cute.jit
    def load_values(self, base: Int32, keys: Int32, warp: Int32, lane: Int32) -> cute.Tensor:
        """ldmatrix.trans words (2 steps, 2 column halves, 4) of this warp's 32 columns; a step past the count is 0."""
        words = cute.make_rmem_tensor(16, Uint32)
        place = base + lane * ROW_PITCH + warp * 32
        for half in cutlass.range_constexpr(2):
            loaded = ptx.load_matrices(place + half * 16, 4, transposed=True)
            for element in cutlass.range_constexpr(4):
                words[half * 4 + element] = loaded[element]
                words[8 + half * 4 + element] = Uint32(0)
        if keys > VALUE_STEP:
            for half in cutlass.range_constexpr(2):
                later = ptx.load_matrices(place + VALUE_STEP * ROW_PITCH + half * 16, 4, transposed=True)
                for element in cutlass.range_constexpr(4):
                    words[8 + half * 4 + element] = later[element]
        return words

    def transpose_values(self, words: Any, step: int) -> list[Any]:
        """f16 operands [2 column halves][2 parities][2 mma] of one 32-key step of `load_values`' words."""
        return [transposed_values([words[step * 8 + half * 4 + element] for element in range(4)]) for half in range(2)]

    @cute.jit
    def rescale_accumulators(self, accumulators: cute.Tensor, lane: Int32, shared: Int32) -> None:
        """accumulators *= exp2(old max - new max), per head."""
        for tile in cutlass.range_constexpr(self.config.tiles):
            place = shared + self.config.shared.rescale + (tile * HEADS + lane // 4) * 4
            upper = ptx.load_shared(place, 1)[0]
            lower = ptx.load_shared(place + 8 * 4, 1)[0]
            for block in cutlass.range_constexpr(4):
                first = tile * 16 + block * 4
                accumulators[first] = ptx.multiply(accumulators[first], upper)
                accumulators[first + 1] = ptx.multiply(accumulators[first + 1], upper)
                accumulators[first + 2] = ptx.multiply(accumulators[first + 2], lower)
                accumulators[first + 3] = ptx.multiply(accumulators[first + 3], lower)

    @cute.jit
    def values(
        self, accumulators: cute.Tensor, values: Any, step: cutlass.Constexpr, lane: Int32, shared: Int32
    ) -> None:
        """accumulators += P . V over one 32-key step.

        accumulators: (tiles, 2 column halves, 2 parities, 4) FP32 of m16n8: [0], [1] head g, [2], [3] head g + 8,
        columns 16 half + 4 q + parity and + 2.
        """
        for tile in cutlass.range_constexpr(self.config.tiles):
            line = tile * HEADS + lane // 4
            place = (
                shared + self.config.shared.probabilities + line * PROBABILITY_PITCH + step * VALUE_STEP + lane % 4 * 8
            )
            upper = ptx.load_shared(place, 2, Uint32)
            lower = ptx.load_shared(place + 8 * PROBABILITY_PITCH, 2, Uint32)
            for half_step in cutlass.range_constexpr(2):
                upper_low, upper_high = ptx.e4m3_to_f16(upper[half_step])
                lower_low, lower_high = ptx.e4m3_to_f16(lower[half_step])
                left = [upper_low, lower_low, upper_high, lower_high]
                for half in cutlass.range_constexpr(2):
                    for parity in cutlass.range_constexpr(2):
                        first = tile * 16 + half * 8 + parity * 4
                        before = [accumulators[first + element] for element in range(4)]
                        after = ptx.mma_f16(left, values[half][parity][half_step], before)
                        for element in cutlass.range_constexpr(4):
                            accumulators[first + element] = after[element]
