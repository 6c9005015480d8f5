"""The cluster's exchange of FP32 partials (family `seed`): values over the own keys, weights in CTA order.

CTA s of the cluster merges columns 128 s .. + 127 of the CTA's heads. Every CTA sends each peer its partials of the
peer's columns (16 t heads x 128 FP32) and every CTA the (max, sum) of its heads; all of it is counted as bytes by the
receiver's inbox mbarrier, so no barrier of the cluster stands between the last P.V and the merge:

    CTA 0           CTA 1           CTA 2           CTA 3
    own  | 1 2 3    own  | 2 3 0    own  | 3 0 1    own  | 0 1 2      <- blocks of the inbox, in ring order after own

    st.async   each thread stores its accumulators (16 bytes at a time) into the peers' inboxes
    bulk       the partials are staged in this CTA's shared memory, then move as one bulk copy a peer

Both carry the same FP32 bits.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from dcp_decode.geometry import HEAD_TILE
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import COMPUTE, SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import (
    VALUE_STEP,
    probability_operands,
    store_fp8_pair_shared,
    transposed_values,
)
from dcp_decode.kernels.sparse_config import WARPS
from dcp_decode.kernels.sparse_outputs import SparseOutputs
from dcp_decode.kernels.sparse_shared import BLOCK, COLUMNS, ROW_PITCH, SPLIT

WARPS_A_PEER = WARPS // SPLIT  # warps that hold one CTA's columns
COMPUTE_THREADS = 32 * WARPS
WARP_ROWS = BLOCK // WARPS  # keys that a warp gathers
LANE_COLUMNS = 4  # of a merged row


class SparsePartials(SparseOutputs):
    """Values, exchange and merge of `SparseDcpDecode` with the exchange of partials."""

    @property
    def partials_bytes(self) -> int:
        """Bytes of the peers' partials that the inbox barrier counts."""
        layout = self.config.partials_layout
        if self.config.bulk:
            return (SPLIT - 1) * layout.partial_bytes
        return (SPLIT - 1) * self.config.head_rows * COLUMNS * 4

    @cute.jit
    def attend_partials(self, keys: Int32, arguments: SparseArguments, worker: Worker) -> None:
        """All chunks of this CTA's keys (perhaps none), then the cluster's merge, for a row of count > 0.

        The first chunk has been gathered.
        """
        config = self.config
        accumulators = cute.make_rmem_tensor(16 * config.tiles, Float32)
        running_max = cute.make_rmem_tensor(config.tiles, Float32)
        running_sum = cute.make_rmem_tensor(config.tiles, Float32)
        accumulators.fill(0.0)
        running_max.fill(float("-inf"))
        running_sum.fill(0.0)
        next_index = cute.make_rmem_tensor(1, Int32)
        next_index[0] = Int32(0)
        query = self.query_operands(worker)
        slab = worker.shared + config.partials_layout.scores
        chunks = (keys + (BLOCK - 1)) // BLOCK
        if chunks > 1:
            next_index[0] = self.own_index(arguments, worker, Int32(1))
        for chunk in cutlass.range(chunks, unroll=1):
            left = keys - chunk * BLOCK
            if cutlass.const_expr(config.buffers == 2):  # noqa: SIM102 (a static and a dynamic condition)
                # The other buffer is free: all its readers passed the first barrier of the previous chunk.
                if left > BLOCK:
                    self.gather_chunk(next_index[0], chunk + 1, left - BLOCK, arguments, worker)
                    next_index[0] = self.own_index(arguments, worker, chunk + 2)
            self.wait_for_keys(chunk, worker)
            self.scores(query, chunk, slab, worker)
            value_words = self.load_values(chunk, left, worker)
            # Partial scores are complete, and the key buffer has been read.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            if cutlass.const_expr(config.buffers == 1):  # noqa: SIM102
                if left > BLOCK:
                    self.gather_chunk(next_index[0], chunk + 1, left - BLOCK, arguments, worker)
                    next_index[0] = self.own_index(arguments, worker, chunk + 2)
            self.softmax(running_max, running_sum, left, slab, arguments, worker)
            # While other warps are still in the softmax.
            values = [self.transpose_values(value_words, step) for step in range(2)]
            # P and the rescale factors are complete, and the scores have been read.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            if chunk > 0:
                self.rescale_accumulators(accumulators, worker)
            self.values(accumulators, values[0], 0, worker)
            if left > VALUE_STEP:
                self.values(accumulators, values[1], 1, worker)

        lines = [self.warp_line(tile, 0, worker) for tile in range(config.tiles)]
        owner_bases = [self.owner_base(arguments, self.head(worker, line)) for line in lines]
        use = self.use_number(worker)
        if cutlass.const_expr(config.bulk):
            self.stage(accumulators, worker)
            self.send_statistics(running_max, running_sum, worker)
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            self.send_staged(worker)
        else:
            self.exchange(accumulators, worker)
            self.send_statistics(running_max, running_sum, worker)
            # This CTA's own partials are complete.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
        if cutlass.const_expr(config.trigger == "merge"):
            cute.arch.griddepcontrol_launch_dependents()
        memory.wait_barrier(worker.shared + config.partials_layout.inbox_barrier, 0)
        for tile in cutlass.range_constexpr(config.tiles):
            self.merge(tile, owner_bases[tile], use, arguments, worker)

    def own_index(self, arguments: SparseArguments, worker: Worker, chunk: Any) -> Any:
        """Flat cache row that this lane gathers in a chunk."""
        return self.load_index(arguments, worker, chunk, worker.warp * WARP_ROWS, WARP_ROWS)

    @cute.jit
    def gather_chunk(self, index: Int32, chunk: Int32, keys: Int32, arguments: SparseArguments, worker: Worker) -> None:
        """Keys of a chunk; V of those past the count are zeros up to its last 32-key step."""
        if worker.thread == 0:
            self.expect_keys(chunk, keys, worker)
        self.gather_keys(index, chunk, keys, worker.warp * WARP_ROWS, WARP_ROWS, arguments, worker)
        count = ptx.minimum_int32(keys, Int32(BLOCK))
        padded = (count + (VALUE_STEP - 1)) // VALUE_STEP * VALUE_STEP
        for turn in cutlass.range_constexpr(VALUE_STEP // WARPS):
            missing = count + worker.warp + turn * WARPS
            if missing < padded:
                zero = Uint32(0)
                place = self.key_buffer(worker, chunk) + missing * ROW_PITCH + worker.lane * 16
                memory.store_shared(place, [zero, zero, zero, zero])

    @cute.jit
    def softmax(
        self,
        running_max: cute.Tensor,
        running_sum: cute.Tensor,
        keys: Int32,
        slab: Int32,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """P and rescale factor of this warp's head of every tile into shared memory."""
        layout = self.config.partials_layout
        for tile in cutlass.range_constexpr(self.config.tiles):
            (((low, high), rescale),) = self.probabilities(
                1, tile, running_max, running_sum, keys, arguments.scale_log2, slab, worker
            )
            line = self.warp_line(tile, 0, worker)
            place = worker.shared + layout.probabilities + line * layout.probability_pitch
            store_fp8_pair_shared(place + self.probability_byte(worker), low, high)
            if worker.lane == 0:
                memory.store_shared(worker.shared + layout.rescale + line * 4, [rescale])

    @cute.jit
    def load_values(self, chunk: Int32, keys: Int32, worker: Worker) -> cute.Tensor:
        """ldmatrix.trans words (2 steps, 2 column halves, 4) of this warp's 32 columns; a step past the count is 0."""
        words = cute.make_rmem_tensor(16, Uint32)
        place = self.key_buffer(worker, chunk) + worker.lane * ROW_PITCH + worker.warp * 32
        for half in cutlass.range_constexpr(2):
            loaded = memory.load_matrices(place + half * 16, 4, transposed=True)
            for element in cutlass.range_constexpr(4):
                words[half * 4 + element] = loaded[element]
                words[8 + half * 4 + element] = Uint32(0)
        if keys > VALUE_STEP:
            for half in cutlass.range_constexpr(2):
                later = memory.load_matrices(place + VALUE_STEP * ROW_PITCH + half * 16, 4, transposed=True)
                for element in cutlass.range_constexpr(4):
                    words[8 + half * 4 + element] = later[element]
        return words

    def transpose_values(self, words: Any, step: int) -> list[Any]:
        """f16 operands [2 column halves][2 parities][2 mma] of one 32-key step of `load_values`' words."""
        return [transposed_values([words[step * 8 + half * 4 + element] for element in range(4)]) for half in range(2)]

    @cute.jit
    def rescale_accumulators(self, accumulators: cute.Tensor, worker: Worker) -> None:
        """accumulators *= exp2(old max - new max), per head."""
        for tile in cutlass.range_constexpr(self.config.tiles):
            place = worker.shared + self.config.partials_layout.rescale + (tile * HEAD_TILE + worker.lane // 4) * 4
            upper = memory.load_shared(place, 1)[0]
            lower = memory.load_shared(place + 8 * 4, 1)[0]
            for block in cutlass.range_constexpr(4):
                first = tile * 16 + block * 4
                accumulators[first] = ptx.multiply(accumulators[first], upper)
                accumulators[first + 1] = ptx.multiply(accumulators[first + 1], upper)
                accumulators[first + 2] = ptx.multiply(accumulators[first + 2], lower)
                accumulators[first + 3] = ptx.multiply(accumulators[first + 3], lower)

    @cute.jit
    def values(self, accumulators: cute.Tensor, values: Any, step: cutlass.Constexpr, worker: Worker) -> None:
        """accumulators += P . V over one 32-key step.

        accumulators: (tiles, 2 column halves, 2 parities, 4) FP32 of m16n8: [0], [1] head g, [2], [3] head g + 8,
        columns 16 half + 4 q + parity and + 2.
        """
        layout = self.config.partials_layout
        pitch = layout.probability_pitch
        for tile in cutlass.range_constexpr(self.config.tiles):
            line = tile * HEAD_TILE + worker.lane // 4
            place = worker.shared + layout.probabilities + line * pitch + step * VALUE_STEP + worker.lane % 4 * 8
            operands = probability_operands(place, pitch)
            for half_step in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    for parity in cutlass.range_constexpr(2):
                        first = tile * 16 + half * 8 + parity * 4
                        before = [accumulators[first + element] for element in range(4)]
                        after = ptx.mma_f16(operands[half_step], values[half][parity][half_step], before)
                        for element in cutlass.range_constexpr(4):
                            accumulators[first + element] = after[element]

    @cute.jit
    def exchange(self, accumulators: cute.Tensor, worker: Worker) -> None:
        """st.async: this thread's partials into its own block or the inbox of the CTA that merges their columns."""
        layout = self.config.partials_layout
        destination = worker.warp // WARPS_A_PEER
        place = self.partial_place(worker)
        if destination == worker.split:
            self.store_partials(accumulators, worker.shared + layout.own_partial + place)
        else:
            block = (worker.split - destination - 1) & (SPLIT - 1)
            remote = memory.map_shared(worker.shared + layout.inbox + block * layout.partial_bytes + place, destination)
            barrier = memory.map_shared(worker.shared + layout.inbox_barrier, destination)
            for tile in cutlass.range_constexpr(self.config.tiles):
                for half in cutlass.range_constexpr(2):
                    offset = tile * HEAD_TILE * layout.partial_pitch + half * 64
                    upper, lower = partial_words(accumulators, tile * 16 + half * 8)
                    memory.store_async(remote + offset, upper, barrier)
                    memory.store_async(remote + offset + 8 * layout.partial_pitch, lower, barrier)

    def partial_place(self, worker: Worker) -> Any:
        """Of a lane's first four columns within a block of partials."""
        line = worker.lane // 4 * self.config.partials_layout.partial_pitch
        return line + worker.warp % WARPS_A_PEER * 128 + worker.lane % 4 * 16

    @cute.jit
    def stage(self, accumulators: cute.Tensor, worker: Worker) -> None:
        """bulk: this thread's partials into its own block or the staged block of their CTA, visible to bulk copies."""
        layout = self.config.partials_layout
        # Own columns are block 0, then the peers in ring order.
        block = (worker.warp // WARPS_A_PEER - worker.split) & (SPLIT - 1)
        place = worker.shared + layout.own_partial + block * layout.partial_bytes + self.partial_place(worker)
        self.store_partials(accumulators, place)
        memory.fence_async_shared()

    def store_partials(self, accumulators: Any, place: Any) -> None:
        layout = self.config.partials_layout
        for tile in range(self.config.tiles):
            for half in range(2):
                offset = tile * HEAD_TILE * layout.partial_pitch + half * 64
                upper, lower = partial_words(accumulators, tile * 16 + half * 8)
                memory.store_shared(place + offset, upper)
                memory.store_shared(place + offset + 8 * layout.partial_pitch, lower)

    @cute.jit
    def send_staged(self, worker: Worker) -> None:
        """bulk: one copy a peer, after the barrier that follows `stage`."""
        layout = self.config.partials_layout
        warp = worker.warp
        if (warp < SPLIT - 1) & (worker.lane == 0):
            peer = (worker.split + 1 + warp) & (SPLIT - 1)
            # Seen from the peer this CTA is SPLIT - 1 - warp steps further round the ring.
            inbox = layout.inbox + (SPLIT - 2 - warp) * layout.partial_bytes
            memory.bulk_send(
                memory.map_shared(worker.shared + inbox, peer),
                worker.shared + layout.staged(0) + warp * layout.partial_bytes,
                layout.partial_bytes,
                memory.map_shared(worker.shared + layout.inbox_barrier, peer),
            )

    @cute.jit
    def merge(
        self, tile: cutlass.Constexpr, owner_base: Any, use: Int32, arguments: SparseArguments, worker: Worker
    ) -> None:
        """Columns 128 split .. + 127 of a tile's 16 heads over the cluster: sum_c w_c acc_c in CTA order."""
        layout = self.config.partials_layout
        line = self.warp_line(tile, 0, worker)
        weights, total, least, largest = self.totals(line, worker)
        sums = [Float32(0.0)] * LANE_COLUMNS
        for cta in cutlass.range_constexpr(SPLIT):
            block = (Int32(cta - 1) - worker.split) & (SPLIT - 1)
            place = worker.shared + layout.inbox + block * layout.partial_bytes
            if worker.split == cta:
                place = worker.shared + layout.own_partial
            partial = memory.load_shared(place + line * layout.partial_pitch + worker.lane * 16, LANE_COLUMNS)
            sums = [ptx.multiply_add(weights[cta], part, before) for part, before in zip(partial, sums, strict=True)]
        words = self.merged_words(sums, total, arguments.out_scale)
        # An even lane takes its neighbour's four columns too: 16-byte stores, 256 adjacent bytes a warp.
        neighbour = [cute.arch.shuffle_sync_bfly(word, 1) for word in words]
        lse = self.lse_word(total, largest)
        # Not `least >= 0`: where all sums are NaN the row is pushed, as NaN.
        aborted = Int32(0)
        if least < Float32(0.0):
            aborted = Int32(1)
        if aborted == 0:
            head = self.head(worker, line)
            if worker.lane % 2 == 0:
                column_bytes = worker.split * (COLUMNS * 2) + worker.lane * (LANE_COLUMNS * 2)
                self.store_columns(owner_base, [*words, *neighbour], column_bytes, use, head, arguments, worker)
            if (worker.lane == 0) & (worker.split == 0):
                self.store_lse(owner_base, lse, use, head, arguments, worker)


def partial_words(accumulators: Any, first: int) -> tuple[list[Any], list[Any]]:
    """Four adjacent columns (4 q ..) of heads g and g + 8 out of the m16n8 accumulators (8) of both parities."""
    even, odd = first, first + 4
    upper = [accumulators[even], accumulators[odd], accumulators[even + 1], accumulators[odd + 1]]
    lower = [accumulators[even + 2], accumulators[odd + 2], accumulators[even + 3], accumulators[odd + 3]]
    return upper, lower
