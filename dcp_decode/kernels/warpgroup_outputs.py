"""Outputs of the warpgroup decode: sums of a cluster's CTAs exchanged and merged, rows normalised and stored.

A warp of the values holds fragments of 16 latent columns x 8 heads, four FP32 a lane: g = lane / 4, q = lane % 4,

    columns 2 g, 2 g + 1 of the fragment, heads 2 q, 2 q + 1:  (c0, c1) of the first column, (c2, c3) of the second

S = 1 normalises them where they are. S > 1: CTA s of the cluster finishes columns 512 / S * s .. of all the heads, and
every fragment goes as it is, 512 adjacent bytes a warp, to the CTA that finishes it:

    fragments --st.async--> inbox[source CTA] --sums in CTA order, weights exp2(max_c - max)--> BF16 pairs
    BF16 pairs --> outputs [heads][512 / S] in shared memory --16 bytes a thread--> owners' mailboxes | latent

The way through shared memory makes whole rows of the 4-byte words that a lane has of each head: adjacent lanes store
adjacent 16-byte pieces, and a peer's link carries full packets.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import COMPUTE, SparseArguments, Worker
from dcp_decode.kernels.sparse_rows import ABORTED_SUM, EMPTY_LSE_WORD, SparseRows
from dcp_decode.kernels.warpgroup_config import COMPUTE_WARPS, WarpgroupConfig

COMPUTE_THREADS = 32 * COMPUTE_WARPS
FRAGMENT_COLUMNS = 16
FRAGMENT_HEADS = 8
FRAGMENT_BYTES = 512
PIECE_BYTES = 16  # of a row, that a thread stores at once
COLUMN_TILES = 2  # of 64 columns, of a warpgroup


class WarpgroupOutputs(SparseRows):
    """From the sums of a CTA's keys to final rows; every method is called by the 512 compute threads."""

    config: WarpgroupConfig

    @property
    def inbox_tx(self) -> int:
        """Bytes that the inbox barrier counts: all CTAs' statistics, and the peers' sums of this CTA's columns."""
        layout = self.config.shared
        return layout.statistics_bytes + (self.config.split - 1) * layout.source_bytes

    @property
    def output_barriers(self) -> list[tuple[int, int]]:
        """(offset, arrivals) of the mbarriers of the cluster's exchange."""
        layout, split = self.config.shared, self.config.split
        return [(layout.inbox_barrier, 1), (layout.inboxes_free_barrier, split - 1)] if split > 1 else []

    def begin_outputs(self, barriers: Any) -> None:
        """One thread, after it has initialised the barriers and before the cluster's first barrier."""
        if self.config.split > 1:
            inbox = barriers + self.config.shared.inbox_barrier // 8
            cute.arch.mbarrier_arrive_and_expect_tx(inbox, self.inbox_tx)

    @property
    def octets(self) -> int:
        """Fragments that cover the CTA's heads."""
        return self.config.head_rows // FRAGMENT_HEADS

    @property
    def column_fragments(self) -> int:
        """Fragments that cover the columns that one CTA finishes."""
        return self.config.shared.columns // FRAGMENT_COLUMNS

    @property
    def row_pieces(self) -> int:
        """16-byte pieces of a head's columns that one CTA finishes."""
        return self.config.shared.columns * 2 // PIECE_BYTES

    @property
    def piece_turns(self) -> int:
        """Turns in which the compute threads store all pieces."""
        return -(-self.config.head_rows * self.row_pieces // COMPUTE_THREADS)

    @cute.jit
    def stage_owners(self, arguments: SparseArguments, worker: Worker) -> None:
        """The table of peers into shared memory, a thread an entry; before a barrier that precedes `finish_row`.

        There an address costs neither the latency of L2 nor registers while the values are summed.
        """
        g = self.config.geometry
        if cutlass.const_expr(self.config.push):  # noqa: SIM102 (a static and a dynamic condition)
            if worker.thread < g.dcp:
                base = memory.load_global_int64(arguments.table + Int64(worker.thread) * 8)
                memory.store_shared_address(worker.shared + self.config.shared.owners + worker.thread * 8, base)

    def staged_owner(self, head: Any, worker: Worker) -> Any:
        """Base address of the owner of a head; 0 on the local route."""
        if not self.config.push:
            return Int64(0)
        owner = head // self.config.geometry.owner_heads
        return memory.load_shared_address(worker.shared + self.config.shared.owners + owner * 8)

    @cute.jit
    def finish_row(self, accumulators: cute.Tensor, arguments: SparseArguments, worker: Worker) -> None:
        """Merge, normalise and store a row of count > 0.

        accumulators: (2 column tiles, octets, 4) FP32, sums of P . V over this CTA's keys. This CTA's (max, sum) of
        every head are in its own statistics, perhaps written just now.
        """
        config = self.config
        use = self.use_number(worker)
        # Statistics are complete, and every warp has read the query, P and the keys for the last time.
        self.meet()
        if cutlass.const_expr(config.trigger == "merge"):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(config.split > 1):
            if cutlass.const_expr(config.shared.inbox_overlays):
                self.await_free_inboxes(worker)
            self.exchange_statistics(worker)
            self.exchange(accumulators, worker)
            # This CTA's own sums are complete.
            self.meet()
            memory.wait_barrier(worker.shared + config.shared.inbox_barrier, 0)
            self.merge(arguments, worker)
        else:
            self.normalise(accumulators, arguments, worker)
        self.meet()
        if self.gave_up(worker) == 0:
            for turn in cutlass.range_constexpr(self.piece_turns):
                self.store_piece(turn, use, arguments, worker)
            if (worker.thread < config.head_rows) & (worker.split == 0):
                _, total, _, largest = self.totals(worker.thread, worker)
                self.store_head_lse(self.lse_word(total, largest), use, arguments, worker)

    @cute.jit
    def empty_row(self, arguments: SparseArguments, worker: Worker) -> None:
        """Outputs of a row of count 0: only EMPTY_LSE is pushed; the local route writes zeros and -inf."""
        aborted = memory.load_shared(worker.shared + self.config.shared.abort_flag, 1, Int32)[0]
        if aborted == 0:
            use = self.use_number(worker)
            if cutlass.const_expr(not self.config.push):
                for turn in cutlass.range_constexpr(self.piece_turns):
                    self.store_words([Uint32(0)] * 4, turn, use, arguments, worker)
            if (worker.thread < self.config.head_rows) & (worker.split == 0):
                self.store_head_lse(Uint32(EMPTY_LSE_WORD), use, arguments, worker)

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)

    def peer(self, split: Any, worker: Worker) -> Any:
        """Shared memory of the CTA of the cluster that has these heads and other keys."""
        groups = self.config.groups
        own = worker.tile_group % groups * self.config.split if groups > 1 else 0
        return memory.map_shared(worker.shared, split + own)

    @cute.jit
    def exchange_statistics(self, worker: Worker) -> None:
        """(max, sum) of every head to all CTAs of the cluster, a thread a head and CTA.

        An aborted CTA (an expired wait) sends the sum -1, which no real sum can be: whoever sees it pushes nothing.
        """
        config, layout = self.config, self.config.shared
        if worker.thread < config.head_rows * config.split:
            line = worker.thread % config.head_rows
            cta = worker.thread // config.head_rows
            maximum, total = memory.load_shared(worker.shared + layout.own_statistics + line * 8, 2)
            aborted = memory.load_shared(worker.shared + layout.abort_flag, 1, Int32)[0]
            total = ptx.select_less(Int32(0), aborted, Float32(ABORTED_SUM), total)
            remote = self.peer(cta, worker)
            place = remote + layout.statistics + (worker.split * config.head_rows + line) * 8
            memory.store_async(place, [maximum, total], remote + layout.inbox_barrier)

    @cute.jit
    def exchange(self, accumulators: cute.Tensor, worker: Worker) -> None:
        """Every fragment into the inbox of the CTA that finishes its columns, this one's own included."""
        layout = self.config.shared
        source = layout.inbox + worker.split * layout.source_bytes + worker.lane * PIECE_BYTES
        for tile in cutlass.range_constexpr(COLUMN_TILES):
            # The warp's 16 columns of this tile among all 32 such groups.
            group = worker.warp // 4 * (4 * COLUMN_TILES) + tile * 4 + worker.warp % 4
            finisher = group // self.column_fragments
            place = source + (group - finisher * self.column_fragments) * (self.octets * FRAGMENT_BYTES)
            if finisher == worker.split:
                for octet in cutlass.range_constexpr(self.octets):
                    fragment = self.fragment(accumulators, tile, octet)
                    memory.store_shared(worker.shared + place + octet * FRAGMENT_BYTES, fragment)
            else:
                remote = self.peer(finisher, worker)
                for octet in cutlass.range_constexpr(self.octets):
                    fragment = self.fragment(accumulators, tile, octet)
                    memory.store_async(remote + place + octet * FRAGMENT_BYTES, fragment, remote + layout.inbox_barrier)

    @cute.jit
    def await_free_inboxes(self, worker: Worker) -> None:
        """Tell the peers that this CTA's inbox, where its keys were, may be written; wait until they all say so."""
        config, layout = self.config, self.config.shared
        if worker.thread < config.split - 1:
            peer = (worker.split + 1 + worker.thread) & (config.split - 1)
            memory.arrive_cluster(self.peer(peer, worker) + layout.inboxes_free_barrier)
        memory.wait_cluster_barrier(worker.shared + layout.inboxes_free_barrier, 0)

    def fragment(self, accumulators: Any, tile: int, octet: int) -> list[Any]:
        """A lane's four sums of a fragment."""
        first = tile * (self.config.head_rows // COLUMN_TILES) + octet * 4
        return [accumulators[first + element] for element in range(4)]

    @cute.jit
    def merge(self, arguments: SparseArguments, worker: Worker) -> None:
        """Sums over the cluster, fragment by fragment: sum_c w_c acc_c in CTA order."""
        config, layout = self.config, self.config.shared
        fragments = self.column_fragments * self.octets
        for turn in cutlass.range_constexpr(-(-fragments // COMPUTE_WARPS)):
            number = worker.warp + turn * COMPUTE_WARPS
            if number < fragments:
                octet = number % self.octets
                line = octet * FRAGMENT_HEADS + worker.lane % 4 * 2
                first_weights, first_total, _, _ = self.totals(line, worker)
                second_weights, second_total, _, _ = self.totals(line + 1, worker)
                sums = [Float32(0.0)] * 4
                for cta in cutlass.range_constexpr(config.split):
                    place = layout.inbox + cta * layout.source_bytes + number * FRAGMENT_BYTES
                    parts = memory.load_shared(worker.shared + place + worker.lane * PIECE_BYTES, 4)
                    weights = [first_weights[cta], second_weights[cta]] * 2
                    sums = [
                        ptx.multiply_add(weight, part, before)
                        for weight, part, before in zip(weights, parts, sums, strict=True)
                    ]
                column = number // self.octets * FRAGMENT_COLUMNS
                self.stage(sums, [first_total, second_total], column, line, arguments, worker)

    def normalise(self, accumulators: Any, arguments: SparseArguments, worker: Worker) -> None:
        """S = 1: the CTA's own sums are those of the row."""
        for octet in range(self.octets):
            line = octet * FRAGMENT_HEADS + worker.lane % 4 * 2
            place = worker.shared + self.config.shared.statistics + line * 8
            _, first_total, _, second_total = memory.load_shared(place, 4)
            for tile in range(COLUMN_TILES):
                column = worker.warp // 4 * (COLUMN_TILES * 64) + tile * 64 + worker.warp % 4 * FRAGMENT_COLUMNS
                sums = self.fragment(accumulators, tile, octet)
                self.stage(sums, [first_total, second_total], column, line, arguments, worker)

    def stage(
        self, sums: list[Any], totals: list[Any], column: Any, line: Any, arguments: SparseArguments, worker: Worker
    ) -> None:
        """A lane's sums of a fragment at `column` as BF16 pairs of heads `line` and `line` + 1 into `outputs`."""
        layout = self.config.shared
        place = worker.shared + layout.outputs + line * layout.output_pitch + (column + worker.lane // 4 * 2) * 2
        for head, total in enumerate(totals):
            (word,) = self.merged_words([sums[head], sums[2 + head]], total, arguments.out_scale)
            memory.store_shared(place + head * layout.output_pitch, [word])

    @cute.jit
    def gave_up(self, worker: Worker) -> Int32:
        """Whether a CTA of the cluster met an expired wait: then none stores anything."""
        config, layout = self.config, self.config.shared
        aborted = memory.load_shared(worker.shared + layout.abort_flag, 1, Int32)[0]
        least = Float32(0.0)
        for cta in range(config.split):
            total = memory.load_shared(worker.shared + layout.statistics + cta * config.head_rows * 8, 2)[1]
            least = ptx.minimum(least, total)
        if least < Float32(0.0):
            aborted = Int32(1)
        return aborted

    def piece_line(self, turn: int, worker: Worker) -> Any:
        """Line of the CTA's heads of which a thread stores a piece in a turn, clamped to the last."""
        line = (worker.thread + turn * COMPUTE_THREADS) // self.row_pieces
        return ptx.minimum_int32(line, Int32(self.config.head_rows - 1))

    def store_piece(self, turn: int, use: Any, arguments: SparseArguments, worker: Worker) -> None:
        """16 staged bytes of a row to its owner, or to this rank's latent."""
        layout = self.config.shared
        place = worker.shared + layout.outputs + self.piece_line(turn, worker) * layout.output_pitch
        words = memory.load_shared(place + worker.thread % self.row_pieces * PIECE_BYTES, 4, Uint32)
        self.store_words(words, turn, use, arguments, worker)

    @cute.jit
    def store_words(
        self,
        words: Any,
        turn: cutlass.Constexpr,
        use: Int32,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        if worker.thread + turn * COMPUTE_THREADS < self.config.head_rows * self.row_pieces:
            head = self.head(worker, self.piece_line(turn, worker))
            column_bytes = worker.split * (self.config.shared.columns * 2)
            column_bytes = column_bytes + worker.thread % self.row_pieces * PIECE_BYTES
            owner_base = self.staged_owner(head, worker)
            self.store_columns(owner_base, words, column_bytes, use, head, arguments, worker)

    def store_head_lse(self, word: Any, use: Any, arguments: SparseArguments, worker: Worker) -> None:
        """The LSE of head `thread` of the CTA's, as its bits."""
        head = self.head(worker, worker.thread)
        self.store_lse(self.staged_owner(head, worker), word, use, head, arguments, worker)
