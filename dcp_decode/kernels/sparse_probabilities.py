"""The cluster's exchange of E4M3 probabilities: every CTA sums its own latent columns over all keys of the row.

A round is 64 keys of each of the four CTAs. CTA s computes P of its own keys and sends the bytes (64 a head) and its
running maximum to all CTAs; beside its own whole rows it gathers columns 128 s .. + 127 of all keys of the round:

    keys of CTA s  --scores, softmax-->  P --st.async--> all CTAs
    columns of CTA s of all keys  --16-byte copies-->  values (8 compute warps, 16 columns each, FP32 registers)

Three roles: 8 compute warps; 4 gather warps, which run ahead by the buffers that the compute warps have freed (all
twelve share the first copies); 4 query warps (`sparse_query`). In a turn of the compute warps the scores of round i
come before the values of round i - 1, so that these hide the exchange of the P that round i + 1 needs:

    scores i | values i - 1 | barrier | softmax i, send P i

The P of round i may overwrite those of round i - 2 in a peer: this CTA has received the peer's P of round i - 1, which
it sent after its barrier of that round, and so after all of its warps had used round i - 2. A CTA without keys in the
last round sends P of 0.

Order of the sums, which makes the family: a CTA's values of a round are one chain of mma from zero at that CTA's
running maximum; sum = w_c values_c + sum over the CTAs in order, w_c = exp2(max_c - M) at the largest maximum M so far.
Statistics and their merge are those of the exchange of partials. So the LSE has the bits of family `seed`, and rows of
one round (256 keys) have them in all columns.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode.geometry import HEAD_TILE
from dcp_decode.kernels import ptx
from dcp_decode.kernels.sparse_arguments import COMPUTE, QUERY_STAGED, SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import store_fp8_pair_shared
from dcp_decode.kernels.sparse_config import COMPUTE_WARPS
from dcp_decode.kernels.sparse_gather import ROUND_BITS, ROUND_KEYS
from dcp_decode.kernels.sparse_shared import CHUNK, COLUMNS, SPLIT
from dcp_decode.kernels.sparse_values import WARP_COLUMNS, SparseValues, head_offset

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
        index = self.load_index(arguments, worker, Int32(0), first_key, share.keys)
        row = self.load_shared_row(first_value, arguments, worker)
        count = self.load_count(arguments, worker)
        keys = self.keys_of_cta(count, worker)
        if cutlass.const_expr(self.shares_copies):
            self.meet_peers()
        self.gather_keys(index, Int32(0), keys, first_key, share.keys, arguments, worker, self.shares_copies)
        if (worker.thread == 0) & (keys > 0):
            self.expect_keys(Int32(0), keys, worker)
        self.gather_shared_values(row, first_value, share.values, count, arguments, worker)
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
        sums = cute.make_rmem_tensor(8 * config.tiles, Float32)
        largest = cute.make_rmem_tensor(2 * config.tiles, Float32)
        running_max = cute.make_rmem_tensor(self.warp_heads * config.tiles, Float32)
        running_sum = cute.make_rmem_tensor(self.warp_heads * config.tiles, Float32)
        sums.fill(0.0)
        largest.fill(-math.inf)
        running_max.fill(-math.inf)
        running_sum.fill(0.0)
        sums_kept, running_kept = 8 * config.tiles, 2 * config.tiles
        self.keep(sums, 0, sums_kept, worker)
        self.keep(running_sum, sums_kept, running_kept, worker)
        rounds = (count + (ROUND_KEYS - 1)) >> ROUND_BITS
        for turn in cutlass.range(rounds + 1, unroll=1):
            self.turn(
                self.unseen(turn), rounds, count, sums, largest, running_max, running_sum, arguments, self.fresh(worker)
            )
        self.take(sums, 0, sums_kept, worker)
        self.output(sums, arguments, worker._replace(row=ptx.grid_z()))

    def fresh(self, worker: Worker) -> Worker:
        """The same worker, without what the compiler derived from its places before."""
        return worker._replace(
            warp=self.unseen(worker.warp), lane=self.unseen(worker.lane), shared=self.unseen(worker.shared)
        )

    def unseen(self, value: Any) -> Any:
        """The same int32; with several tiles the compiler may keep nothing of it in registers: it would spill."""
        return value if self.config.tiles == 1 else ptx.opaque(value)

    @cute.jit
    def turn(
        self,
        turn: Int32,
        rounds: Int32,
        count: Int32,
        sums: cute.Tensor,
        largest: cute.Tensor,
        running_max: cute.Tensor,
        running_sum: cute.Tensor,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """Scores of round `turn`, where there is one, and values of the round before."""
        config = self.config
        left = self.keys_of_cta(count, worker) - turn * CHUNK
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
            self.score_round(turn, slab, worker)
        if turn > 0:
            self.values_of_round(sums, largest, running_max, running_sum, turn - 1, rounds, self.fresh(worker))
        if turn < rounds:
            # The scores are complete; keys of this round and values of the one before have been used.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            if worker.thread == 0:
                self.free_buffers(turn, worker)
            self.send_probabilities(running_max, running_sum, turn, left, slab, arguments, self.fresh(worker))

    def score_round(self, turn: Any, slab: Any, worker: Worker) -> None:
        """Partial scores of the CTA's keys of a round; the query is unpacked while they are on their way."""
        query = self.query_operands(worker)
        ready = [word for operand in query or () for word in operand]
        self.wait_for_keys(
            turn, worker, ready, worker.shared + self.config.probabilities_layout.scratch + worker.thread * 4
        )
        self.scores(query, turn, slab, worker)

    @cute.jit
    def free_buffers(self, turn: Int32, worker: Worker) -> None:
        """One thread: the gather warps may overwrite the keys of round `turn` and the values of the one before."""
        layout = self.config.probabilities_layout
        cute.arch.mbarrier_arrive(worker.barriers + (layout.keys_free_barrier(0) // 8 + self.buffer(turn)))
        if turn > 0:
            cute.arch.mbarrier_arrive(worker.barriers + (layout.values_free_barrier(0) // 8 + self.buffer(turn - 1)))

    @cute.jit
    def send_probabilities(
        self,
        running_max: cute.Tensor,
        running_sum: cute.Tensor,
        number: Int32,
        left: Int32,
        slab: Int32,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """P of this warp's two heads of every tile to all CTAs, 16 bytes a lane, and their running maxima."""
        layout = self.config.probabilities_layout
        heads = self.warp_heads
        outgoing = worker.shared + layout.outgoing + worker.warp * (heads * CHUNK)
        byte = self.probability_byte(worker)
        self.take(running_sum, 8 * self.config.tiles, self.config.tiles * heads, worker)
        for tile in cutlass.range_constexpr(self.config.tiles):
            place = outgoing + tile * (HEAD_TILE * CHUNK) + byte
            if left > 0:
                self.store_probabilities(place, tile, running_max, running_sum, left, slab, arguments, worker)
            else:
                for member in cutlass.range_constexpr(heads):
                    store_fp8_pair_shared(place + member * CHUNK, Float32(0.0), Float32(0.0))
        self.keep(running_sum, 8 * self.config.tiles, self.config.tiles * heads, worker)
        cute.arch.sync_warp()
        piece, cta, member = worker.lane % 4, worker.lane // 4 % SPLIT, worker.lane // 16
        parity = number & 1
        remote = ptx.map_shared(worker.shared, self.cluster_rank(worker, cta))
        barrier = remote + layout.probability_barrier(0) + parity * 8
        # Heads 2, 3 of every four have their two 32-byte halves swapped: no bank conflict for the readers.
        swizzled = (piece ^ (worker.warp * heads & 2)) * PIECE_BYTES
        sender = parity * layout.probability_bytes + worker.split * (self.config.head_rows * CHUNK)
        line = worker.warp * heads + member
        destination = remote + layout.probabilities + sender + line * CHUNK + swizzled
        maxima = remote + layout.maxima + parity * layout.maxima_bytes + (line * SPLIT + worker.split) * 4
        for tile in cutlass.range_constexpr(self.config.tiles):
            first = tile * HEAD_TILE
            words = ptx.load_shared(outgoing + (first + member) * CHUNK + piece * PIECE_BYTES, 4, Uint32)
            ptx.store_async(destination + first * CHUNK, words, barrier)
            if piece == 0:
                maximum = ptx.select_less(member, Int32(1), running_max[tile * heads], running_max[tile * heads + 1])
                ptx.store_async(maxima + first * (SPLIT * 4), [maximum], barrier)

    def store_probabilities(
        self,
        place: Any,
        tile: int,
        running_max: Any,
        running_sum: Any,
        left: Any,
        slab: Any,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """P of this warp's two heads of a tile; `place`: of a lane's bytes of the first."""
        results = self.probabilities(tile, running_max, running_sum, left, arguments.scale_log2, slab, worker)
        for member, (low, high, _) in enumerate(results):
            store_fp8_pair_shared(place + member * CHUNK, low, high)

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
                ptx.store_shared(place + head_offset(tile, upper) * layout.output_pitch, columns)
        if cutlass.const_expr(config.trigger == "merge"):
            cute.arch.griddepcontrol_launch_dependents()
        ptx.wait_barrier(worker.shared + layout.inbox_barrier, 0)
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
        columns = [*ptx.load_shared(place, 4), *ptx.load_shared(place + PIECE_BYTES, 4)]
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
