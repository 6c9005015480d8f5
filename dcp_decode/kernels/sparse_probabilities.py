"""The cluster's exchange of E4M3 probabilities: every CTA sums its own latent columns over all keys of the row.

A round is a chunk of each of the four CTAs: 64 keys, or 128 in two blocks, so that one round serves rows of 256 or 512
keys. CTA s computes P of its own keys and sends the bytes (64 a head and block) and its running maximum to all CTAs;
beside its own whole rows it gathers columns 128 s .. + 127 of all keys of the round:

    keys of CTA s  --scores, softmax-->  P --st.async--> all CTAs
    columns of CTA s of all keys  --16-byte copies-->  values (8 compute warps, 16 columns each, FP32 registers)

Three roles: 8 compute warps; 4 gather warps, which run ahead by the buffers that the compute warps have freed (all
twelve share the first copies); 4 query warps (`sparse_query`). In a turn of the compute warps the scores of round i
come before the values of round i - 1, so that these hide the exchange of the P that round i + 1 needs:

    scores i | values i - 1 | barrier | softmax i, send P i

The P of round i may overwrite those of round i - 2 in a peer: this CTA has received the peer's P of round i - 1, which
it sent after its barrier of that round, and so after all of its warps had used round i - 2. A CTA without keys in the
last round sends P of 0.

A second block is computed together with the first, not after it: its scores, P and values take the same turns, in
steps of 32 keys of a CTA. How many (`more_steps`: none up to 256 keys, one up to 384, else both) follows from the row's
count, alike in all CTAs of a cluster, and each number has code of its own. Rows of one round, but the longest of a
second block, run straight through theirs; the others go round a loop.

Order of the sums, which makes the family: a CTA's values of a round are one chain of mma from zero at that CTA's
running maximum; sum = w_c values_c + sum over the CTAs in order, w_c = exp2(max_c - M) at the largest maximum M so far.
Statistics and their merge are those of the exchange of partials. So chunks of 64 give the LSE of family `seed`, and
rows of up to 256 keys have its bits in all columns, with either chunk.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode.geometry import HEAD_TILE
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import COMPUTE, QUERY_STAGED, SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import VALUE_STEP, store_fp8_pair_shared
from dcp_decode.kernels.sparse_config import COMPUTE_WARPS
from dcp_decode.kernels.sparse_gather import ROW_BLOCK
from dcp_decode.kernels.sparse_shared import BLOCK, COLUMNS, SPLIT
from dcp_decode.kernels.sparse_values import WARP_COLUMNS, SparseValues, State, head_offset

COMPUTE_THREADS = 32 * COMPUTE_WARPS
PIECE_BYTES = 16  # of one store of P or of output
OUTPUT_PIECES = COLUMNS * 2 // PIECE_BYTES


class SparseProbabilities(SparseValues):
    """Rounds, exchange and outputs of `SparseDcpDecode` with the exchange of probabilities."""

    @cute.jit
    def compute_probabilities(self, arguments: SparseArguments, worker: Worker) -> None:
        """A compute warp: its part of the first keys, all rounds, outputs."""
        share = self.compute_share
        first_key, first_value = self.first_places(share, worker)
        index = self.load_first_index(first_key, share, arguments, worker)
        blocks = range(self.config.blocks)
        rows = [self.load_shared_row(block, first_value, arguments, worker) for block in blocks]
        count = self.load_count(arguments, worker)
        keys = self.keys_of_cta(count, worker)
        if cutlass.const_expr(self.shares_copies):
            self.meet_peers()
        self.gather_first_keys(index, first_key, share, keys, arguments, worker)
        for block in cutlass.range_constexpr(self.config.blocks):
            if (worker.thread == 0) & (keys > block * BLOCK):
                self.expect_keys(Int32(block), keys - block * BLOCK, worker)
        if cutlass.const_expr(self.config.blocks > 1):  # noqa: SIM102 (a static and a dynamic condition)
            if worker.thread == 0:
                for parity in cutlass.range_constexpr(2):
                    self.expect_probabilities(worker.barriers, parity, self.more_steps(count))
        for block in cutlass.range_constexpr(self.config.blocks):
            self.gather_shared_values(rows[block], block, first_value, share, count, arguments, worker)
        if cutlass.const_expr(not self.shares_copies):
            self.meet_peers()
        if count > 0:
            self.attend_probabilities(count, arguments, worker)
        else:
            self.wait_for_query()
            self.empty_row(arguments, worker)

    def wait_for_query(self) -> None:
        """Until the query, the use number and the abort flag are in shared memory."""
        cute.arch.barrier(barrier_id=QUERY_STAGED, number_of_threads=self.config.staged_threads)

    @cute.jit
    def attend_probabilities(self, count: Int32, arguments: SparseArguments, worker: Worker) -> None:
        """All rounds of a row of count > 0, then its outputs."""
        config = self.config
        state = State(
            cute.make_rmem_tensor(8 * config.tiles, Float32),
            cute.make_rmem_tensor(2 * config.tiles, Float32),
            cute.make_rmem_tensor(self.warp_heads * config.tiles, Float32),
            cute.make_rmem_tensor(self.warp_heads * config.tiles, Float32),
        )
        state.sums.fill(0.0)
        state.largest.fill(-math.inf)
        state.running_max.fill(-math.inf)
        state.running_sum.fill(0.0)
        sums_kept, running_kept = 8 * config.tiles, 2 * config.tiles
        self.keep(state.sums, 0, sums_kept, worker)
        self.keep(state.running_sum, sums_kept, running_kept, worker)
        if cutlass.const_expr(config.tiles > 1):
            self.attend_rounds(0, count, state, arguments, worker)
        else:
            self.attend_by_length(count, state, arguments, worker)
        self.take(state.sums, 0, sums_kept, worker)
        self.output(state.sums, arguments, worker._replace(row=ptx.grid_z()))

    @cute.jit
    def attend_by_length(self, count: Int32, state: State, arguments: SparseArguments, worker: Worker) -> None:
        """Code of its own for each kind of row, so that the shorter ones run straight through theirs."""
        if cutlass.const_expr(self.config.blocks == 1):
            if count <= ROW_BLOCK:
                self.attend_round(0, count, state, arguments, worker)
            else:
                self.attend_rounds(0, count, state, arguments, worker)
        else:
            more = self.more_steps(count)
            if more == 0:
                self.attend_round(0, count, state, arguments, worker)
            elif more == 1:
                self.attend_round(1, count, state, arguments, worker)
            else:
                self.attend_rounds(2, count, state, arguments, worker)

    @cute.jit
    def attend_round(
        self, more_steps: cutlass.Constexpr, count: Int32, state: State, arguments: SparseArguments, worker: Worker
    ) -> None:
        """The one round of a short row."""
        keys = self.keys_of_cta(count, worker)
        slab = worker.shared + self.config.probabilities_layout.scores
        first, rounds = Int32(0), Int32(1)
        self.wait_for_query()
        if keys > 0:
            self.score_round(more_steps, first, keys, slab, worker)
        cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
        self.send_probabilities(more_steps, state, first, keys, slab, arguments, worker)
        self.values_of_round(more_steps, state, first, rounds, worker)

    @cute.jit
    def attend_rounds(
        self, more_steps: cutlass.Constexpr, count: Int32, state: State, arguments: SparseArguments, worker: Worker
    ) -> None:
        """Any number of rounds."""
        rounds = self.rounds(count)
        for turn in cutlass.range(rounds + 1, unroll=1):
            self.turn(more_steps, self.unseen(turn), rounds, count, state, arguments, self.fresh(worker))

    def fresh(self, worker: Worker) -> Worker:
        """The same worker, without what the compiler derived from its places before."""
        return worker._replace(
            warp=self.unseen(worker.warp), lane=self.unseen(worker.lane), shared=self.unseen(worker.shared)
        )

    def unseen(self, value: Any) -> Any:
        """The same int32; of several tiles or blocks the compiler may keep nothing derived from it: it would spill."""
        return value if self.config.tiles == self.config.blocks == 1 else ptx.opaque(value)

    @cute.jit
    def turn(
        self,
        more_steps: cutlass.Constexpr,
        turn: Int32,
        rounds: Int32,
        count: Int32,
        state: State,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """Scores of round `turn`, where there is one, and values of the round before."""
        config = self.config
        left = self.keys_of_cta(count, worker) - turn * config.chunk
        slab = (
            worker.shared
            + config.probabilities_layout.scores
            + (turn & (config.probabilities_layout.slabs - 1)) * config.probabilities_layout.slab_bytes
        )
        if cutlass.const_expr(config.probabilities_layout.slabs == 1):  # noqa: SIM102 (a static and a dynamic condition)
            if (turn > 0) & (turn < rounds):
                # The scores of the round before have been read.
                cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
        if turn == 0:
            # As late as that: what precedes the first use of the query is done while it is on its way.
            self.wait_for_query()
        if left > 0:
            self.score_round(more_steps, turn, left, slab, worker)
        if turn > 0:
            self.values_of_round(more_steps, state, turn - 1, rounds, self.fresh(worker))
        if turn < rounds:
            # The scores are complete; keys of this round and values of the one before have been used.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            if worker.thread == 0:
                self.free_buffers(turn, worker)
            self.send_probabilities(more_steps, state, turn, left, slab, arguments, self.fresh(worker))

    def score_round(self, more_steps: int, turn: Any, left: Any, slab: Any, worker: Worker) -> None:
        """Partial scores of the CTA's keys of a round; the query is unpacked while they are on their way."""
        query = self.query_operands(worker)
        ready = [word for operand in query or () for word in operand]
        block = turn * self.config.blocks
        self.wait_for_keys(
            block, worker, ready, worker.shared + self.config.probabilities_layout.scratch + worker.thread * 4
        )
        if more_steps:
            self.wait_for_second_block(block + 1, left - BLOCK, worker)
        self.scores(query, block, slab, worker, more_steps)

    @cute.jit
    def wait_for_second_block(self, block: Int32, left: Int32, worker: Worker) -> None:
        """As `wait_for_keys`, of a block that need not have keys of this CTA."""
        if left > 0:
            self.wait_for_keys(block, worker)

    @cute.jit
    def free_buffers(self, turn: Int32, worker: Worker) -> None:
        """One thread: the gather warps may overwrite the keys of round `turn` and the values of the one before."""
        layout, blocks = self.config.probabilities_layout, self.config.blocks
        for block in cutlass.range_constexpr(blocks):
            slot = self.slot(turn * blocks + block)
            cute.arch.mbarrier_arrive(worker.barriers + (layout.keys_free_barrier(0) // 8 + slot))
        if turn > 0:
            for block in cutlass.range_constexpr(blocks):
                slot = self.slot((turn - 1) * blocks + block)
                cute.arch.mbarrier_arrive(worker.barriers + (layout.values_free_barrier(0) // 8 + slot))

    @cute.jit
    def send_probabilities(
        self,
        more_steps: cutlass.Constexpr,
        state: State,
        number: Int32,
        left: Int32,
        slab: Int32,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """P of this warp's two heads of every tile to all CTAs, 16 bytes a lane and block, and their running maxima.

        more_steps: 32-key steps of a second block.
        """
        layout = self.config.probabilities_layout
        heads, blocks = self.warp_heads, 1 if more_steps == 0 else 2
        outgoing = worker.shared + layout.outgoing + worker.warp * (heads * BLOCK)
        byte = self.probability_byte(worker)
        self.take(state.running_sum, 8 * self.config.tiles, self.config.tiles * heads, worker)
        for tile in cutlass.range_constexpr(self.config.tiles):
            place = outgoing + tile * (HEAD_TILE * BLOCK) + byte
            if left > 0:
                self.store_probabilities(blocks, place, tile, state, left, slab, arguments, worker)
            else:
                nothing = [([Float32(0.0)] * (2 * blocks), None)] * heads
                self.store_pairs(nothing, place)
        self.keep(state.running_sum, 8 * self.config.tiles, self.config.tiles * heads, worker)
        cute.arch.sync_warp()
        piece, cta, member = worker.lane % 4, worker.lane // 4 % SPLIT, worker.lane // 16
        parity = number & 1
        remote = memory.map_shared(worker.shared, self.cluster_rank(worker, cta))
        barrier = remote + layout.probability_barrier(0) + parity * 8
        # Heads 2, 3 of every four have their two 32-byte halves swapped: no bank conflict for the readers.
        swizzled = (piece ^ (worker.warp * heads & 2)) * PIECE_BYTES
        sender = parity * (self.config.blocks * layout.probability_bytes) + worker.split * layout.outgoing_bytes
        line = worker.warp * heads + member
        destination = remote + layout.probabilities + sender + line * BLOCK + swizzled
        maxima = remote + layout.maxima + parity * layout.maxima_bytes + (line * SPLIT + worker.split) * 4
        for tile in cutlass.range_constexpr(self.config.tiles):
            first = tile * HEAD_TILE
            own = outgoing + (first + member) * BLOCK + piece * PIECE_BYTES
            words = memory.load_shared(own, 4, Uint32)
            memory.store_async(destination + first * BLOCK, words, barrier)
            if piece == 0:
                both = [state.running_max[tile * heads + index] for index in range(2)]
                maximum = ptx.select_less(member, Int32(1), *both)
                memory.store_async(maxima + first * (SPLIT * 4), [maximum], barrier)
            if cutlass.const_expr(more_steps > 0):  # noqa: SIM102 (a static and a dynamic condition)
                if piece * PIECE_BYTES < more_steps * VALUE_STEP:
                    words = memory.load_shared(own + layout.outgoing_bytes, 4, Uint32)
                    memory.store_async(destination + first * BLOCK + layout.probability_bytes, words, barrier)

    def store_probabilities(
        self,
        blocks: int,
        place: Any,
        tile: int,
        state: State,
        left: Any,
        slab: Any,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """P of this warp's two heads of a tile; `place`: of a lane's bytes of the first."""
        scale_log2 = arguments.scale_log2
        results = self.probabilities(blocks, tile, state.running_max, state.running_sum, left, scale_log2, slab, worker)
        self.store_pairs(results, place)

    def store_pairs(self, results: list[tuple[list[Any], Any]], place: Any) -> None:
        """`probabilities`' results as bytes on their way to all CTAs."""
        for member, (own, _) in enumerate(results):
            for block in range(len(own) // 2):
                place_of_block = place + member * BLOCK + block * self.config.probabilities_layout.outgoing_bytes
                store_fp8_pair_shared(place_of_block, own[2 * block], own[2 * block + 1])

    @cute.jit
    def output(self, sums: cute.Tensor, arguments: SparseArguments, worker: Worker) -> None:
        """Normalise and store: through shared memory from 16 columns of all heads a warp to 256 bytes of two heads."""
        config = self.config
        layout = config.probabilities_layout
        half = worker.lane // OUTPUT_PIECES
        lines = [self.warp_line(tile, 0, worker) + half for tile in range(config.tiles)]
        owner_bases = [self.owner_base(arguments, self.head(worker, line)) for line in lines]
        use = self.use_number(worker)
        place = worker.shared + layout.outputs + worker.lane // 4 * layout.output_pitch
        place = place + (worker.warp * WARP_COLUMNS + worker.lane % 4 * 4) * 4
        for tile in cutlass.range_constexpr(config.tiles):
            for upper in cutlass.range_constexpr(2):
                columns = [sums[tile * 8 + column * 4 + upper * 2 + pair] for pair in range(2) for column in range(2)]
                memory.store_shared(place + head_offset(tile, upper) * layout.output_pitch, columns)
        if cutlass.const_expr(config.trigger == "merge"):
            cute.arch.griddepcontrol_launch_dependents()
        memory.wait_barrier(worker.shared + layout.inbox_barrier, 0)
        finals = [self.final(line, worker) for line in lines]
        # The sums are complete in shared memory.
        cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
        for tile in cutlass.range_constexpr(config.tiles):
            self.store_row(lines[tile], finals[tile], owner_bases[tile], use, arguments, worker)

    def final(self, line: Any, worker: Worker) -> tuple[Any, Any, Any, Any]:
        """(total, 1 / total, least sum, LSE word) of a head: of `totals` what its output needs."""
        _, total, least, largest = self.totals(line, worker)
        return total, ptx.divide(Float32(1.0), total), least, self.lse_word(total, largest)

    @cute.jit
    def store_row(
        self, line: Int32, final: Any, owner_base: Int64, use: Int32, arguments: SparseArguments, worker: Worker
    ) -> None:
        """Eight columns of one of the CTA's heads, and its LSE."""
        layout = self.config.probabilities_layout
        total, inverse, least, lse = final
        piece = worker.lane % OUTPUT_PIECES
        place = worker.shared + layout.outputs + line * layout.output_pitch + piece * (2 * PIECE_BYTES)
        columns = [*memory.load_shared(place, 4), *memory.load_shared(place + PIECE_BYTES, 4)]
        words = self.merged_words(columns, total, arguments.out_scale, inverse)
        # Not `least >= 0`: where all sums are NaN the row is pushed, as NaN.
        aborted = Int32(0)
        if least < Float32(0.0):
            aborted = Int32(1)
        if aborted == 0:
            head = self.head(worker, line)
            column_bytes = worker.split * (COLUMNS * 2) + piece * PIECE_BYTES
            self.store_columns(owner_base, words, column_bytes, use, head, arguments, worker)
            if (piece == 0) & (worker.split == 0):
                self.store_lse(owner_base, lse, use, head, arguments, worker)
