"""Keys of a CTA in blocks of 64: gather, scores, probabilities; shared by both exchanges.

How the 16 warps share the work (g = lane / 4, q = lane % 4; a tile is 16 query heads):

    gather   warp w, lane 0..3     rows 4 w + lane of the block, one 576-byte bulk copy each
    scores   warp w                keys 16 (w / 4) .. + 15 x bytes 144 (w % 4) .. + 143 x 16 heads, 9 steps of m16n8k16
    softmax  warp w                head w of each tile; lane: the two keys 16 (lane / 8) + lane % 8 and + 8

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

Keys past the count: their scores are replaced by -inf (P = 0), and their V bytes are zeros, because 0 x NaN of stale
shared memory would be NaN.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.geometry import HEAD_TILE
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_config import SparseConfig
from dcp_decode.kernels.sparse_rows import SparseRows
from dcp_decode.kernels.sparse_shared import BLOCK, DEPTHS, ROW_PITCH, SPLIT

STEP_BYTES = 16  # bytes of a row in one mma step
DEPTH_STEPS = numerics.ROW_BYTES // STEP_BYTES // DEPTHS
VALUE_STEP = 32  # keys of one transposed V step
EMPTY = -math.inf


def store_fp8_pair_shared(pointer: Any, low: Any, high: Any) -> None:
    """E4M3 (satfinite, nearest even) of FP32 `low`, `high` as two adjacent bytes of shared memory, `low` first."""
    memory.store_shared_half(pointer, ptx.e4m3_pair(low, high))


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
    words = memory.load_matrices(address + step * STEP_BYTES, 4 if step + 1 < DEPTH_STEPS else 2)
    return [query_operand(words[pair], words[pair + 1]) for pair in range(0, len(words), 2)]


def load_key_operands(address: Any, step: int) -> list[list[list[Any]]]:
    """f16 mma right operands [steps][2 key octets] of steps `step` and, before the last, `step` + 1."""
    words = memory.load_matrices(address + step * STEP_BYTES, 4 if step + 1 < DEPTH_STEPS else 2)
    unpacked = [ptx.e4m3_to_f16(word) for word in words]
    return [unpacked[pair : pair + 2] for pair in range(0, len(words), 2)]


def transposed_values(words: list[Any]) -> list[list[list[Any]]]:
    """f16 right operands [2 column parities][2 mma] of four ldmatrix.trans words (32 keys x 16 columns)."""
    columns = [ptx.e4m3_to_f16(word) for word in transpose4(words)]
    return [[[columns[parity][half], columns[2 + parity][half]] for half in range(2)] for parity in range(2)]


def probability_operands(address: Any, pitch: int) -> list[list[Any]]:
    """f16 left operands (2 mma of a 32-key step) of the P bytes of heads g (at a lane's address) and g + 8."""
    upper = memory.load_shared(address, 2, Uint32)
    lower = memory.load_shared(address + 8 * pitch, 2, Uint32)
    return [query_operand(upper[half_step], lower[half_step]) for half_step in range(2)]


class Pair(NamedTuple):
    """Two key octets, what one ldmatrix covers: a lane's address in the first of some pairs and that one's number in
    the chunk, both `offset` keys before this pair's.
    """

    place: Any
    key: Any
    offset: int


class SparseChunk(SparseRows):
    """Gather, scores and softmax of `SparseDcpDecode`."""

    config: SparseConfig

    @property
    def query_in_registers(self) -> bool:
        """One tile keeps its unpacked query for all chunks (36 registers); more tiles reload it from shared memory."""
        return self.config.tiles == 1

    @property
    def warp_heads(self) -> int:
        """Heads of a tile whose softmax and output one warp computes: adjacent ones."""
        return HEAD_TILE // self.config.compute_warps

    @property
    def warp_keys(self) -> int:
        """Keys of a block whose partial scores one warp computes."""
        return BLOCK * DEPTHS // self.config.compute_warps

    @cute.jit
    def load_index(
        self, arguments: SparseArguments, worker: Worker, block: Int32, first: Int32, width: cutlass.Constexpr
    ) -> Int32:
        """Flat cache row of the key that this lane gathers in a block: positions `first` + lane, `width` lanes."""
        index = Int32(0)
        if worker.lane < width:
            position = block * BLOCK + first + worker.lane
            index = self.load_row_number(arguments, worker, worker.split + SPLIT * position)
        return index

    def slot(self, block: Any) -> Any:
        """Buffer of a block's keys (and values); `block` counts from the CTA's first."""
        return block & (self.config.shared.slots - 1)

    def phase(self, block: Any) -> Any:
        """Parity of the phase in which the barriers of a block's buffer complete."""
        return (block >> (self.config.shared.slots - 1)) & 1

    def key_buffer(self, worker: Worker, block: Any) -> Any:
        """Address of the buffer of a block's keys."""
        return worker.shared + self.config.shared.keys + self.slot(block) * (BLOCK * ROW_PITCH)

    @cute.jit
    def expect_keys(self, block: Int32, keys: Int32, worker: Worker) -> None:
        """One thread: arm the barrier of a block from which on `keys` keys are left, at least one."""
        count = ptx.minimum_int32(keys, Int32(BLOCK))
        barrier = worker.barriers + (1 + self.slot(block))
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * numerics.ROW_BYTES)

    @cute.jit
    def gather_keys(
        self,
        index: Int32,
        block: Int32,
        keys: Int32,
        first: Int32,
        width: cutlass.Constexpr,
        arguments: SparseArguments,
        worker: Worker,
        shared: cutlass.Constexpr = False,
    ) -> None:
        """Start this warp's copies of a block from which on `keys` keys are left; shared: see `bulk_copy`.

        The other arguments are `load_index`'s.
        """
        position = first + worker.lane
        if (worker.lane < width) & (position < keys):
            self.bulk_copy(
                self.key_buffer(worker, block) + position * ROW_PITCH,
                arguments.kv + Int64(index) * numerics.ROW_BYTES,
                numerics.ROW_BYTES,
                worker.shared + self.config.shared.key_barrier(0) + self.slot(block) * 8,
                worker,
                shared,
            )

    def bulk_copy(
        self, destination: Any, source: Any, count_bytes: int, barrier: Any, worker: Worker, shared: bool
    ) -> None:
        """Global to shared memory: of this CTA, or `shared`, to the same place of all CTAs that have the same keys."""
        if shared:
            ctas = Int32(sum(1 << SPLIT * group for group in range(self.config.groups))) << worker.split
            memory.bulk_multicast(destination, source, count_bytes, barrier, ctas)
        else:
            memory.bulk_load(destination, source, count_bytes, barrier)

    def cluster_rank(self, worker: Worker, cta: Any) -> Any:
        """Number in the cluster of the CTA that has keys `cta`, `cta` + SPLIT .. of the worker's heads."""
        return cta if self.config.groups == 1 else cta + worker.tile_group % self.config.groups * SPLIT

    def wait_for_keys(self, block: Any, worker: Worker, ready: Any = (), scratch: Any = 0) -> None:
        """Until the keys of a block are in their buffer; ready, scratch: see `memory.wait_barrier`."""
        barrier = worker.shared + self.config.shared.key_barrier(0) + self.slot(block) * 8
        memory.wait_barrier(barrier, self.phase(block), ready, scratch)

    def scores(self, query: Any, block: Any, slab: Any, worker: Worker, more_steps: int = 0) -> None:
        """Partial scores of this warp's keys and depth into the slab; `query`: operands of one tile or None.

        Of a block and so many 32-key steps of the next one, which lies behind it.
        """
        depth = worker.warp % DEPTHS
        group = worker.warp // DEPTHS
        first_key = group * self.warp_keys
        octet_row = (worker.lane // 8) % 2 * 8 + worker.lane % 8
        column = (depth * DEPTH_STEPS + worker.lane // 16) * STEP_BYTES
        key_place = self.key_buffer(worker, block) + (first_key + octet_row) * ROW_PITCH + column
        own = [Pair(key_place, first_key, 16 * pair) for pair in range(self.warp_keys // 16)]
        if more_steps:
            # Dealt so that the warps share each step.
            behind = BLOCK - group * (self.warp_keys - 16)
            later = (key_place + behind * ROW_PITCH, first_key + behind)
            own += [Pair(*later, VALUE_STEP * step) for step in range(more_steps)]
        width = 1 if self.config.tiles > 2 else len(own)
        for first in range(0, len(own), width):
            self.score_pairs(own[first : first + width], query, depth, slab, worker)

    def score_pairs(self, pairs: list[Pair], query: Any, depth: Any, slab: Any, worker: Worker) -> None:
        """Partial scores of all tiles with some pairs of key octets, 16 keys each: what one ldmatrix covers."""
        tiles, pitch = range(self.config.tiles), self.config.shared.score_pitch
        numbers = range(len(pairs))
        sums = {(tile, pair, octet): [Float32(0.0)] * 4 for tile in tiles for pair in numbers for octet in range(2)}
        # Steps outside, tiles inside: each pair of key operands serves all tiles and then dies.
        for first in range(0, DEPTH_STEPS, 2):
            keys = [load_key_operands(pair.place + pair.offset * ROW_PITCH, first) for pair in pairs]
            for tile in tiles:
                if self.query_in_registers:
                    operands = query[first : first + 2]
                else:
                    operands = load_query_operands(self.query_place(tile, worker), first)
                for offset, operand in enumerate(operands):
                    for pair in numbers:
                        for octet in range(2):
                            place = (tile, pair, octet)
                            sums[place] = ptx.mma_f16(operand, keys[pair][offset][octet], sums[place])
        for tile in tiles:
            for pair in numbers:
                upper = [sums[tile, pair, octet][element] for element in (0, 1) for octet in range(2)]
                lower = [sums[tile, pair, octet][element] for element in (2, 3) for octet in range(2)]
                # (head g, keys 2 q and 2 q + 8, then 2 q + 1 and 2 q + 9): what one softmax lane reads is adjacent.
                line = depth * self.config.head_rows + tile * HEAD_TILE + worker.lane // 4
                key = pairs[pair].key + pairs[pair].offset
                place = slab + line * pitch + (key + worker.lane % 4 * 4) * 4
                memory.store_shared(place, upper)
                memory.store_shared(place + 8 * pitch, lower)

    def query_place(self, tile: int, worker: Worker) -> Any:
        """A lane's ldmatrix address of one tile's query for this warp's depth."""
        row = tile * HEAD_TILE + (worker.lane // 8) % 2 * 8 + worker.lane % 8
        column = (worker.warp % DEPTHS * DEPTH_STEPS + worker.lane // 16) * STEP_BYTES
        return worker.shared + self.config.shared.query + row * ROW_PITCH + column

    def query_operands(self, worker: Worker) -> list[list[Any]] | None:
        """All operands of a CTA of one tile for this warp's depth; None where they stay in shared memory."""
        if not self.query_in_registers:
            return None
        operands = []
        for step in range(0, DEPTH_STEPS, 2):
            operands += load_query_operands(self.query_place(0, worker), step)
        return operands

    def probabilities(
        self,
        blocks: int,
        tile: int,
        running_max: Any,
        running_sum: Any,
        keys: Any,
        scale_log2: Any,
        slab: Any,
        worker: Worker,
    ) -> list[tuple[list[Any], Any]]:
        """(P of a lane's two keys of each block, FP32; exp2(old max - new max)) of this warp's heads of a tile.

        running_max, running_sum (tiles, warp_heads) are updated, the sum per lane. keys: those left of this CTA. A NaN
        score never enters the maximum but makes the lane's sum NaN, which no later chunk removes. All heads are loaded
        before the first one is computed: one after the other, each would wait for its own loads.
        """
        key = worker.lane // 8 * 16 + worker.lane % 8
        members = range(self.warp_heads)
        parts = []
        for member in members:
            pitch = self.config.shared.score_pitch
            place = slab + self.warp_line(tile, member, worker) * pitch + worker.lane * 8
            stride = self.config.head_rows * pitch
            first = [place + block * (BLOCK * 4) for block in range(blocks)]
            parts.append([[memory.load_shared(each + depth * stride, 2) for depth in range(DEPTHS)] for each in first])
        logits = []
        for member in members:
            present = []
            for block in range(blocks):
                scores = parts[member][block][0]
                for part in parts[member][block][1:]:
                    scores = [ptx.add(score, more) for score, more in zip(scores, part, strict=True)]
                scaled = [ptx.multiply(score, scale_log2) for score in scores]
                # Keys past the count: key of the first, 8 more of the second.
                places = [key + (8 * index + BLOCK * block) for index in range(2)]
                present += [ptx.select_less(places[index], keys, scaled[index], Float32(EMPTY)) for index in range(2)]
            logits.append(present)
        largest = [ptx.warp_maximum(reduce(ptx.maximum, logits[member])) for member in members]
        results = []
        for member in members:
            index = tile * self.warp_heads + member
            before = running_max[index]
            after = ptx.maximum(largest[member], before)
            rescale = ptx.exp2(ptx.add(before, -after))
            anchor = ptx.add(Float32(numerics.LOG2_E4M3_MAX), -after)
            own, *more = [ptx.exp2(ptx.add(logit, anchor)) for logit in logits[member]]
            running_max[index] = after
            running_sum[index] = reduce(ptx.add, more, ptx.multiply_add(running_sum[index], rescale, own))
            results.append(([own, *more], rescale))
        return results

    def warp_line(self, tile: int, member: int, worker: Worker) -> Any:
        """Number of this warp's head `member` of a tile among the CTA's heads."""
        return tile * HEAD_TILE + worker.warp * self.warp_heads + member

    def probability_byte(self, worker: Worker) -> Any:
        """Place of a lane's two P bytes within the 64 of a head."""
        lane = worker.lane
        return lane // 16 * 32 + lane % 8 // 2 * 8 + lane // 8 % 2 * 4 + lane % 2 * 2
