"""Outputs of the sparse decode: a merged row of a head to its owner's value mailbox, or to this rank's own memory."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import SparseChunk
from dcp_decode.kernels.sparse_shared import COLUMNS, SPLIT

BF16_NAN_PAIR = numerics.BF16_NAN << 16 | numerics.BF16_NAN
EMPTY_LSE_WORD = numerics.EMPTY_LSE_BITS & 0xFFFFFFFF
ABORTED_SUM = -1.0


class SparseOutputs(SparseChunk):
    """Statistics of a cluster, final rows and where they go."""

    def owner_base(self, arguments: SparseArguments, head: Any) -> Any:
        """Base address of the owner of a head: loaded before the wait for the peers hides it; 0 on the local route."""
        if not self.config.push:
            return Int64(0)
        return ptx.load_global_int64(arguments.table + Int64(head // self.config.geometry.owner_heads) * 8)

    def use_number(self, worker: Worker) -> Any:
        """This use's number, as the query thread told it: its generation is that of the value mailboxes."""
        return ptx.load_shared(worker.shared + self.config.shared.use_number, 1, Int32)[0]

    def head(self, worker: Worker, line: Any) -> Any:
        """Query head of a line of the CTA's heads."""
        return worker.tile_group * self.config.head_rows + line

    @cute.jit
    def send_statistics(self, running_max: cute.Tensor, running_sum: cute.Tensor, worker: Worker) -> None:
        """(max, sum) of this warp's head of every tile to all CTAs of the cluster.

        An aborted CTA (an expired wait) sends the sum -1, which no real sum can be: whoever sees it pushes nothing.
        """
        layout = self.config.shared
        aborted = ptx.load_shared(worker.shared + layout.abort_flag, 1, Int32)[0]
        remote = ptx.map_shared(worker.shared, ptx.minimum_int32(worker.lane, Int32(SPLIT - 1)))
        for index in cutlass.range_constexpr(self.config.tiles * self.warp_heads):
            total = running_sum[index]
            for distance in (16, 8, 4, 2, 1):
                total = ptx.add(total, cute.arch.shuffle_sync_bfly(total, distance))
            total = ptx.select_less(Int32(0), aborted, Float32(ABORTED_SUM), total)
            if worker.lane < SPLIT:
                line = self.warp_line(index // self.warp_heads, index % self.warp_heads, worker)
                place = remote + layout.statistics + (worker.split * self.config.head_rows + line) * 8
                ptx.store_async(place, [running_max[index], total], remote + layout.inbox_barrier)

    def totals(self, line: Any, worker: Worker) -> tuple[list[Any], Any, Any, Any]:
        """(weights, total, least sum, largest max) over the cluster for one of the CTA's heads.

        weights: exp2(max_c - largest). total = sum_c w_c sum_c in CTA order. least: below 0 where a CTA gave up.
        """
        first = worker.shared + self.config.shared.statistics + line * 8
        statistics = [ptx.load_shared(first + cta * self.config.head_rows * 8, 2) for cta in range(SPLIT)]
        largest, least = statistics[0]
        for maximum, total in statistics[1:]:
            largest = ptx.maximum(largest, maximum)
            least = ptx.minimum(least, total)
        weights = [ptx.exp2(ptx.add(maximum, -largest)) for maximum, _ in statistics]
        total = Float32(0.0)
        for weight, (_, part) in zip(weights, statistics, strict=True):
            total = ptx.multiply_add(weight, part, total)
        return weights, total, least, largest

    def merged_words(self, sums: list[Any], total: Any, out_scale: Any) -> list[Any]:
        """Adjacent columns as BF16 pairs: sums / total * k_scale; canonical NaNs where the total is NaN."""
        inverse = ptx.divide(Float32(1.0), total)
        merged = [ptx.multiply(ptx.multiply(value, inverse), out_scale) for value in sums]
        pairs = [ptx.bf16_pair(merged[first], merged[first + 1]) for first in range(0, len(merged), 2)]
        return [ptx.replace_if_nan(pair, total, BF16_NAN_PAIR) for pair in pairs]

    def lse_word(self, total: Any, largest: Any) -> Any:
        """The LSE of a head, base 2 (push) or natural (local), as its bits; a canonical NaN where the total is NaN."""
        lse = ptx.add(largest, ptx.log2(ptx.multiply(total, Float32(1.0 / numerics.E4M3_MAX))))
        if not self.config.push:
            lse = ptx.multiply(lse, Float32(numerics.LN_2))
        return ptx.replace_if_nan(ptx.float_bits(lse), total, numerics.FP32_NAN)

    def slot_line(self, use: Any, head: Any, arguments: SparseArguments, worker: Worker) -> Any:
        """Line of (generation, source = this rank, row, head of its owner) in an owner's value mailbox."""
        g = self.config.geometry
        slot = Int64(use % g.generations * g.dcp + arguments.rank) * g.capacity + Int64(worker.row)
        return slot * g.owner_heads + Int64(head % g.owner_heads)

    def store_columns(
        self,
        owner_base: Any,
        words: Any,
        column_bytes: Any,
        use: Any,
        head: Any,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """16 bytes of a merged row: to its owner's mailbox, or to this rank's latent [B, padded, 512]."""
        g = self.config.geometry
        row_bytes = numerics.LATENT_DIM * 2
        if self.config.push:
            line = self.slot_line(use, head, arguments, worker)
            place = owner_base + self.config.mailbox.payload.offset + line * row_bytes
            ptx.store_words_system(place + Int64(column_bytes), words)
        else:
            line = Int64(worker.row) * g.padded_heads + Int64(head)
            ptx.store_global(arguments.latent + line * row_bytes + Int64(column_bytes), words)

    def store_lse(
        self, owner_base: Any, word: Any, use: Any, head: Any, arguments: SparseArguments, worker: Worker
    ) -> None:
        """The row's LSE (`lse_word`) to its owner, or to this rank's lse [B, padded]."""
        g = self.config.geometry
        if self.config.push:
            line = self.slot_line(use, head, arguments, worker)
            ptx.store_word_system(owner_base + self.config.mailbox.lse_log2.offset + line * 4, word)
        else:
            line = Int64(worker.row) * g.padded_heads + Int64(head)
            ptx.store_global(arguments.lse + line * 4, [word])

    @cute.jit
    def empty_row(self, arguments: SparseArguments, worker: Worker) -> None:
        """Outputs of a row of count 0: only EMPTY_LSE is pushed; the local route writes zeros and -inf."""
        aborted = ptx.load_shared(worker.shared + self.config.shared.abort_flag, 1, Int32)[0]
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
