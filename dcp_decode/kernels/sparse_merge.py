"""The cluster's FP32 merge: partials to the CTA that owns their columns, weights in CTA order, rows to their owners.

CTA s of the cluster merges columns 128 s .. + 127 of the CTA's heads. Every CTA sends each peer its partials of the
peer's columns (16 t heads x 128 FP32) and every CTA the (max, sum) of its heads; all of it is counted as bytes by the
receiver's inbox mbarrier, so no barrier of the cluster stands between the last P.V and the merge:

    CTA 0           CTA 1           CTA 2           CTA 3
    own  | 1 2 3    own  | 2 3 0    own  | 3 0 1    own  | 0 1 2      <- blocks of the inbox, in ring order after own

    st.async   each thread stores its accumulators (16 bytes at a time) into the peers' inboxes
    bulk       the partials are staged in this CTA's shared memory, then move as one bulk copy a peer

Both carry the same FP32 bits. An aborted CTA (an expired wait) sends the sum -1, which no real sum can be: whoever sees
it pushes nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import ptx
from dcp_decode.kernels.sparse_config import COLUMNS, INBOX_PITCH, SPLIT, WARPS, SparseConfig

HEADS = 16
WARPS_A_PEER = WARPS // SPLIT  # warps that hold one CTA's columns
ABORTED_SUM = -1.0
BF16_NAN_PAIR = numerics.BF16_NAN << 16 | numerics.BF16_NAN
EMPTY_LSE_WORD = numerics.EMPTY_LSE_BITS & 0xFFFFFFFF


class SparseMerge:
    """Exchange, merge and outputs of `SparseDcpDecode`."""

    config: SparseConfig

    @property
    def inbox_bytes(self) -> int:
        """Bytes that the inbox barrier of every CTA counts: the peers' partials and all four CTAs' statistics."""
        if self.config.bulk:
            partials = (SPLIT - 1) * self.config.shared.partial_bytes
        else:
            partials = (SPLIT - 1) * self.config.head_rows * COLUMNS * 4
        return partials + SPLIT * self.config.head_rows * 8

    @cute.jit
    def exchange(self, accumulators: cute.Tensor, split: Int32, warp: Int32, lane: Int32, shared: Int32) -> None:
        """st.async: this thread's partials into its own block or the inbox of the CTA that merges their columns."""
        layout = self.config.shared
        destination = warp // WARPS_A_PEER
        place = (lane // 4) * INBOX_PITCH + warp % WARPS_A_PEER * 128 + lane % 4 * 16
        if destination == split:
            self.store_partials(accumulators, shared + layout.own_partial + place)
        else:
            block = (split - destination - 1) & (SPLIT - 1)
            remote = ptx.map_shared(shared + layout.inbox + block * layout.partial_bytes + place, destination)
            barrier = ptx.map_shared(shared + layout.inbox_barrier, destination)
            for tile in cutlass.range_constexpr(self.config.tiles):
                for half in cutlass.range_constexpr(2):
                    offset = tile * HEADS * INBOX_PITCH + half * 64
                    upper, lower = partial_words(accumulators, tile, half)
                    ptx.store_async(remote + offset, upper, barrier)
                    ptx.store_async(remote + offset + 8 * INBOX_PITCH, lower, barrier)

    @cute.jit
    def stage(self, accumulators: cute.Tensor, split: Int32, warp: Int32, lane: Int32, shared: Int32) -> None:
        """bulk: this thread's partials into its own block or the staged block of their CTA, visible to bulk copies."""
        layout = self.config.shared
        destination = warp // WARPS_A_PEER
        # Own columns are block 0, then the peers in ring order.
        block = (destination - split) & (SPLIT - 1)
        place = (lane // 4) * INBOX_PITCH + warp % WARPS_A_PEER * 128 + lane % 4 * 16
        self.store_partials(accumulators, shared + layout.own_partial + block * layout.partial_bytes + place)
        ptx.fence_async_shared()

    @cute.jit
    def store_partials(self, accumulators: cute.Tensor, place: Int32) -> None:
        for tile in cutlass.range_constexpr(self.config.tiles):
            for half in cutlass.range_constexpr(2):
                offset = tile * HEADS * INBOX_PITCH + half * 64
                upper, lower = partial_words(accumulators, tile, half)
                ptx.store_shared(place + offset, upper)
                ptx.store_shared(place + offset + 8 * INBOX_PITCH, lower)

    @cute.jit
    def send_staged(self, split: Int32, warp: Int32, lane: Int32, shared: Int32) -> None:
        """bulk: one copy a peer, after the barrier that follows `stage`."""
        layout = self.config.shared
        if (warp < SPLIT - 1) & (lane == 0):
            peer = (split + 1 + warp) & (SPLIT - 1)
            # Seen from the peer this CTA is SPLIT - 1 - warp steps further round the ring.
            inbox = layout.inbox + (SPLIT - 2 - warp) * layout.partial_bytes
            ptx.bulk_send(
                ptx.map_shared(shared + inbox, peer),
                shared + layout.staged(0) + warp * layout.partial_bytes,
                layout.partial_bytes,
                ptx.map_shared(shared + layout.inbox_barrier, peer),
            )

    @cute.jit
    def send_statistics(
        self,
        running_max: cute.Tensor,
        running_sum: cute.Tensor,
        split: Int32,
        warp: Int32,
        lane: Int32,
        shared: Int32,
    ) -> None:
        """(max, sum) of this warp's head of every tile to all four CTAs."""
        layout = self.config.shared
        aborted = ptx.load_shared(shared + layout.abort_flag, 1, Int32)[0]
        for tile in cutlass.range_constexpr(self.config.tiles):
            total = running_sum[tile]
            for distance in (16, 8, 4, 2, 1):
                total = ptx.add(total, cute.arch.shuffle_sync_bfly(total, distance))
            total = ptx.select_less(Int32(0), aborted, Float32(ABORTED_SUM), total)
            if lane < SPLIT:
                place = layout.statistics + (split * self.config.head_rows + tile * HEADS + warp) * 8
                barrier = ptx.map_shared(shared + layout.inbox_barrier, lane)
                ptx.store_async(ptx.map_shared(shared + place, lane), [running_max[tile], total], barrier)

    def owner_bases(self, table: Any, tile_group: Any, warp: Any) -> list[Any]:
        """Base address of the owner of this warp's head of every tile: loaded before the inbox wait hides it."""
        if not self.config.push:
            return []
        heads = [tile_group * self.config.head_rows + tile * HEADS + warp for tile in range(self.config.tiles)]
        return [ptx.load_global_int64(table + Int64(head // self.config.geometry.owner_heads) * 8) for head in heads]

    @cute.jit
    def merge(
        self,
        tile: cutlass.Constexpr,
        owner_base: Any,
        latent: Int64,
        lse: Int64,
        out_scale: Float32,
        rank: Int32,
        use: Int32,
        row: Int32,
        tile_group: Int32,
        split: Int32,
        warp: Int32,
        lane: Int32,
        shared: Int32,
    ) -> None:
        """Columns 128 split .. + 127 of a tile's 16 heads over the cluster: warp = head, lane = 4 columns.

        out = BF16(sum_c w_c acc_c / total * k_scale), total = sum_c w_c sum_c, w_c = exp2(max_c - max), c = 0 .. 3.
        """
        layout = self.config.shared
        line = tile * HEADS + warp
        statistics = [
            ptx.load_shared(shared + layout.statistics + (cta * self.config.head_rows + line) * 8, 2)
            for cta in range(SPLIT)
        ]
        largest = statistics[0][0]
        least = statistics[0][1]
        for cta in cutlass.range_constexpr(1, SPLIT):
            largest = ptx.maximum(largest, statistics[cta][0])
            least = ptx.minimum(least, statistics[cta][1])
        total = Float32(0.0)
        sums = [Float32(0.0)] * 4
        for cta in cutlass.range_constexpr(SPLIT):
            block = (Int32(cta - 1) - split) & (SPLIT - 1)
            place = shared + layout.inbox + block * layout.partial_bytes
            if split == cta:
                place = shared + layout.own_partial
            partial = ptx.load_shared(place + line * INBOX_PITCH + lane * 16, 4)
            weight = ptx.exp2(ptx.add(statistics[cta][0], -largest))
            total = ptx.multiply_add(weight, statistics[cta][1], total)
            sums = [ptx.multiply_add(weight, part, before) for part, before in zip(partial, sums, strict=True)]
        inverse = ptx.divide(Float32(1.0), total)
        merged = [ptx.multiply(ptx.multiply(value, inverse), out_scale) for value in sums]
        words = [
            ptx.replace_if_nan(ptx.bf16_pair(merged[0], merged[1]), total, BF16_NAN_PAIR),
            ptx.replace_if_nan(ptx.bf16_pair(merged[2], merged[3]), total, BF16_NAN_PAIR),
        ]
        # An even lane takes its neighbour's four columns too: 16-byte stores, 256 adjacent bytes a warp.
        neighbour = [cute.arch.shuffle_sync_bfly(word, 1) for word in words]
        lse_log2 = ptx.add(largest, ptx.log2(ptx.multiply(total, Float32(1.0 / numerics.E4M3_MAX))))
        # Not `least >= 0`: where all sums are NaN the row is pushed, as NaN.
        aborted = Int32(0)
        if least < Float32(0.0):
            aborted = Int32(1)
        if aborted == 0:
            head = tile_group * self.config.head_rows + line
            if lane % 2 == 0:
                four = [words[0], words[1], neighbour[0], neighbour[1]]
                column_bytes = split * (COLUMNS * 2) + lane * 8
                self.store_columns(owner_base, latent, four, column_bytes, rank, use, row, head)
            if (lane == 0) & (split == 0):
                self.store_lse(owner_base, lse, lse_log2, total, rank, use, row, head)

    @cute.jit
    def slot_line(self, rank: Int32, use: Int32, row: Int32, head: Int32) -> Int64:
        """Line of (generation, source = this rank, row, head of its owner) in an owner's value mailbox."""
        g = self.config.geometry
        slot = Int64(use % g.generations * g.dcp + rank) * g.capacity + Int64(row)
        return slot * g.owner_heads + Int64(head % g.owner_heads)

    @cute.jit
    def store_columns(
        self,
        owner_base: Any,
        latent: Int64,
        words: Any,
        column_bytes: Int32,
        rank: Int32,
        use: Int32,
        row: Int32,
        head: Int32,
    ) -> None:
        """16 bytes of a merged row: to its owner's mailbox, or to this rank's latent [B, padded, 512]."""
        g = self.config.geometry
        if cutlass.const_expr(self.config.push):
            line = self.slot_line(rank, use, row, head)
            place = owner_base + self.config.mailbox.payload.offset + line * (numerics.LATENT_DIM * 2)
            ptx.store_words_system(place + Int64(column_bytes), words)
        else:
            line = Int64(row) * g.padded_heads + Int64(head)
            ptx.store_global(latent + line * (numerics.LATENT_DIM * 2) + Int64(column_bytes), words)

    @cute.jit
    def store_lse(
        self,
        owner_base: Any,
        lse: Int64,
        lse_log2: Float32,
        total: Float32,
        rank: Int32,
        use: Int32,
        row: Int32,
        head: Int32,
    ) -> None:
        """The row's LSE: base 2 to its owner, natural to this rank's lse [B, padded]."""
        g = self.config.geometry
        if cutlass.const_expr(self.config.push):
            word = ptx.replace_if_nan(ptx.float_bits(lse_log2), total, numerics.FP32_NAN)
            line = self.slot_line(rank, use, row, head)
            ptx.store_word_system(owner_base + self.config.mailbox.lse_log2.offset + line * 4, word)
        else:
            lse_ln = ptx.multiply(lse_log2, Float32(numerics.LN_2))
            word = ptx.replace_if_nan(ptx.float_bits(lse_ln), total, numerics.FP32_NAN)
            ptx.store_global(lse + (Int64(row) * g.padded_heads + Int64(head)) * 4, [word])

    @cute.jit
    def empty_row(
        self,
        table: Int64,
        latent: Int64,
        lse: Int64,
        rank: Int32,
        use: Int32,
        row: Int32,
        tile_group: Int32,
        split: Int32,
        warp: Int32,
        lane: Int32,
        shared: Int32,
    ) -> None:
        """Outputs of a row of count 0: only EMPTY_LSE is pushed; the local route writes zeros and -inf."""
        aborted = ptx.load_shared(shared + self.config.shared.abort_flag, 1, Int32)[0]
        if aborted == 0:
            for tile in cutlass.range_constexpr(self.config.tiles):
                head = tile_group * self.config.head_rows + tile * HEADS + warp
                if cutlass.const_expr(not self.config.push):  # noqa: SIM102 (a static and a dynamic condition)
                    if lane % 2 == 0:
                        zero = Uint32(0)
                        column_bytes = split * (COLUMNS * 2) + lane * 8
                        self.store_columns(None, latent, [zero, zero, zero, zero], column_bytes, rank, use, row, head)
                if (lane == 0) & (split == 0):
                    owner_base = Int64(0)
                    if cutlass.const_expr(self.config.push):
                        owner_base = ptx.load_global_int64(table + Int64(head // self.config.geometry.owner_heads) * 8)
                    minus_infinity = ptx.bits_float(Uint32(EMPTY_LSE_WORD))
                    self.store_lse(owner_base, lse, minus_infinity, Float32(0.0), rank, use, row, head)


def partial_words(accumulators: Any, tile: int, half: int) -> tuple[list[Any], list[Any]]:
    """Four adjacent columns (16 half + 4 q ..) of heads g and g + 8 out of the m16n8 accumulators of both parities."""
    even = tile * 16 + half * 8
    odd = even + 4
    upper = [accumulators[even], accumulators[odd], accumulators[even + 1], accumulators[odd + 1]]
    lower = [accumulators[even + 2], accumulators[odd + 2], accumulators[even + 3], accumulators[odd + 3]]
    return upper, lower
