"""Outputs of `SparseDcpDecode`: statistics to the cluster, and rows without keys."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import SparseChunk
from dcp_decode.kernels.sparse_rows import ABORTED_SUM, EMPTY_LSE_WORD
from dcp_decode.kernels.sparse_shared import COLUMNS


class SparseOutputs(SparseChunk):
    """What a warp that holds a head of every tile sends, and the outputs of rows without keys."""

    @cute.jit
    def send_statistics(self, running_max: cute.Tensor, running_sum: cute.Tensor, worker: Worker) -> None:
        """(max, sum) of this warp's head of every tile to all CTAs of the cluster.

        An aborted CTA (an expired wait) sends the sum -1, which no real sum can be: whoever sees it pushes nothing.
        """
        layout = self.config.shared
        aborted = memory.load_shared(worker.shared + layout.abort_flag, 1, Int32)[0]
        cta = ptx.minimum_int32(worker.lane, Int32(self.config.split - 1))
        remote = memory.map_shared(worker.shared, self.cluster_rank(worker, cta))
        totals = [running_sum[index] for index in range(self.config.tiles * self.warp_heads)]
        for distance in (16, 8, 4, 2, 1):
            totals = [ptx.add(total, cute.arch.shuffle_sync_bfly(total, distance)) for total in totals]
        totals = [ptx.select_less(Int32(0), aborted, Float32(ABORTED_SUM), total) for total in totals]
        if worker.lane < self.config.split:
            for index in cutlass.range_constexpr(self.config.tiles * self.warp_heads):
                line = self.warp_line(index // self.warp_heads, index % self.warp_heads, worker)
                place = remote + layout.statistics + (worker.split * self.config.head_rows + line) * 8
                memory.store_async(place, [running_max[index], totals[index]], remote + layout.inbox_barrier)

    @cute.jit
    def empty_row(self, arguments: SparseArguments, worker: Worker) -> None:
        """Outputs of a row of count 0: only EMPTY_LSE is pushed; the local route writes zeros and -inf."""
        aborted = memory.load_shared(worker.shared + self.config.shared.abort_flag, 1, Int32)[0]
        if aborted == 0:
            use = self.use_number(worker)
            zero = Uint32(0)
            for index in cutlass.range_constexpr(self.config.tiles * self.warp_heads):
                head = self.head(worker, self.warp_line(index // self.warp_heads, index % self.warp_heads, worker))
                if cutlass.const_expr(not self.config.push):  # noqa: SIM102 (a static and a dynamic condition)
                    if worker.lane < COLUMNS * 2 // 16:
                        place = worker.split * (COLUMNS * 2) + worker.lane * 16
                        self.store_columns(Int64(0), [zero, zero, zero, zero], place, use, head, arguments, worker)
                if (worker.lane == 0) & (worker.split == 0):
                    owner_base = self.owner_base(arguments, head)
                    self.store_lse(owner_base, Uint32(EMPTY_LSE_WORD), use, head, arguments, worker)
