"""What every sparse decode reads of a row, and where its outputs go: an owner's value mailbox or this rank's memory."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64

from dcp_decode import numerics
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker

BF16_NAN_PAIR = numerics.BF16_NAN << 16 | numerics.BF16_NAN
EMPTY_LSE_WORD = numerics.EMPTY_LSE_BITS & 0xFFFFFFFF
ABORTED_SUM = -1.0


class SparseRows:
    """Keys of a CTA, and a head's final row from the statistics of its cluster."""

    config: Any  # of any sparse decode (`sparse_layout.DecodeConfig`)

    def load_count(self, arguments: SparseArguments, worker: Worker) -> Any:
        """The row's count of keys, 0 .. K."""
        count = memory.load_global_int32(arguments.valid + Int64(worker.row) * 4)
        return ptx.minimum_int32(ptx.maximum_int32(count, Int32(0)), Int32(self.config.geometry.topk))

    def keys_of_cta(self, count: Any, worker: Worker) -> Any:
        """How many of a row's `count` keys are this CTA's: key j of the row goes to CTA j % split."""
        split = self.config.split
        return (count - worker.split + (split - 1)) >> (split.bit_length() - 1)

    def load_row_number(self, arguments: SparseArguments, worker: Worker, key: Any) -> Any:
        """Flat cache row of a key of the worker's row, clamped to the list's width: it may precede the count."""
        width = self.config.geometry.topk
        place = Int64(worker.row) * width + Int64(ptx.minimum_int32(key, Int32(width - 1)))
        return memory.load_global_int32(arguments.rows + place * 4)

    def owner_base(self, arguments: SparseArguments, head: Any) -> Any:
        """Base address of the owner of a head: loaded before the wait for the peers hides it; 0 on the local route."""
        if not self.config.push:
            return Int64(0)
        return memory.load_global_int64(arguments.table + Int64(head // self.config.geometry.owner_heads) * 8)

    def use_number(self, worker: Worker) -> Any:
        """This use's number, as the query thread told it: its generation is that of the value mailboxes."""
        return memory.load_shared(worker.shared + self.config.shared.use_number, 1, Int32)[0]

    def head(self, worker: Worker, line: Any) -> Any:
        """Query head of a line of the CTA's heads."""
        return worker.tile_group * self.config.head_rows + line

    def totals(self, line: Any, worker: Worker) -> tuple[list[Any], Any, Any, Any]:
        """(weights, total, least sum, largest max) over the cluster for one of the CTA's heads.

        weights: exp2(max_c - largest). total = sum_c w_c sum_c in CTA order. least: below 0 where a CTA gave up.
        """
        first = worker.shared + self.config.shared.statistics + line * 8
        statistics = [
            memory.load_shared(first + cta * self.config.head_rows * 8, 2) for cta in range(self.config.split)
        ]
        largest, least = statistics[0]
        for maximum, total in statistics[1:]:
            largest = ptx.maximum(largest, maximum)
            least = ptx.minimum(least, total)
        weights = [ptx.exp2(ptx.add(maximum, -largest)) for maximum, _ in statistics]
        total = Float32(0.0)
        for weight, (_, part) in zip(weights, statistics, strict=True):
            total = ptx.multiply_add(weight, part, total)
        return weights, total, least, largest

    def merged_words(self, sums: list[Any], total: Any, out_scale: Any, inverse: Any = None) -> list[Any]:
        """Adjacent columns as BF16 pairs: sums / total * k_scale; canonical NaNs where the total is NaN.

        inverse: 1 / total where the caller has it already.
        """
        if inverse is None:
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
            memory.store_words_system(place + Int64(column_bytes), words)
        else:
            line = Int64(worker.row) * g.padded_heads + Int64(head)
            memory.store_global(arguments.latent + line * row_bytes + Int64(column_bytes), words)

    def store_lse(
        self, owner_base: Any, word: Any, use: Any, head: Any, arguments: SparseArguments, worker: Worker
    ) -> None:
        """The row's LSE (`lse_word`) to its owner, or to this rank's lse [B, padded]."""
        g = self.config.geometry
        if self.config.push:
            line = self.slot_line(use, head, arguments, worker)
            memory.store_word_system(owner_base + self.config.mailbox.lse_log2.offset + line * 4, word)
        else:
            line = Int64(worker.row) * g.padded_heads + Int64(head)
            memory.store_global(arguments.lse + line * 4, [word])
