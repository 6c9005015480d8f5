"""SparseWarpgroups: sparse MLA decode by wgmma (sm_90a), for many rows or long ones.

    query mailbox --query warps--> f16 | flat cache --bulk copies, multicast--> E4M3 rows of keys, 64 a barrier
                                        v
    S^T = K Q^T (64 keys x n heads a warpgroup) -> softmax -> P^T, f16 -> O^T = V^T P^T (128 columns a warpgroup)
                                        v
    merged rows: BF16, LSE --> owners' value mailboxes | latent, lse

Four compute warpgroups and a query warpgroup a CTA; a CTA serves n heads of a row (N of its wgmma, so the wide side of
the problem, keys and columns, is M) and key j of the row goes to CTA j % S of its cluster. Left operands come from
registers: E4M3 bytes are unpacked to f16 there, exactly, because wgmma of E4M3 operands keeps too few bits of a sum.

Measured on an H200 (1980 MHz) as a launch of a graph, us with keys in L2 (evicted), beside the exchange of `sparse`
that is fastest there, at 96 heads; (n, S, chunk, head groups of a cluster):

    rows x keys                        us                    rows x keys                       us
      5 x 256    (8, 2, 128, 2)    5.1 (5.4)    4.0 (4.5)    5 x 512    (16, 4, 128, 2)    6.1 (6.6)    6.0 (6.8)
      8 x 256   (16, 2, 128, 2)    5.8 (6.2)    7.0          5 x 1024   (16, 4, 256, 2)    8.1 (9.0)   10.4
     16 x 256   (16, 1, 256, 2)    7.3 (7.9)   14.2          5 x 2048   (32, 8, 256, 1)   13.0 (14.1)  17.7
     40 x 256   (32, 1, 256, 1)   11.2 (12.5)  29.6          8 x 301    (16, 2, 256, 2)    6.5 (7.1)
     16 x 301   (24, 2, 256, 1)    8.9 (9.6)                40 x 301    (32, 1, 256, 1)   14.1 (15.7)

The gather bounds it (`warpgroup_gather`): at 40 x 256, cycles after the dependency wait, on average: query staged 6500,
keys there 9000, scores 11900, P 13600, values 17000, rows staged 18100, end 19400. Few heads save little: scores and
values of 256 keys took 2100 + 2600 cycles for n = 8, 2400 + 2800 for 16, 2850 + 3350 for 32. 48 heads spill at the 96
registers of 640 threads, and ptxas then waits for every wgmma.

Tried and dropped (us before and after): two buffers of 128 keys, one loaded while the other is computed, instead of
one of 256: 40 x 1024 32.4 -> 36.1, 5 x 2048 (16, 4) 13.9 -> 15.8, 16 x 512 10.7 -> 11.7; four warpgroups that share
the last tile of a chunk with at most 64 keys left: 40 x 301 14.05 -> 14.46.

compute-sanitizer (memcheck, synccheck, racecheck) finds nothing but one order that racecheck doesn't know: copies of a
later chunk by a head group's peer, after reads that an mbarrier orders (`await_free_keys`; tests/gpu/sanitizers.py).

Rooms: `warpgroup_config`, `warpgroup_shared` (shared memory), `warpgroup_query`, `warpgroup_gather`,
`warpgroup_scores`, `warpgroup_values`, `warpgroup_outputs`, `wgmma` (instructions). Protocol, roles and arguments are
those of `sparse`.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from dcp_decode.kernels import memory
from dcp_decode.kernels.sparse_arguments import COMPUTE, QUERY_STAGED, SparseArguments, Worker
from dcp_decode.kernels.sparse_launch import SparseLaunch
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig
from dcp_decode.kernels.warpgroup_gather import WarpgroupGather
from dcp_decode.kernels.warpgroup_outputs import WarpgroupOutputs
from dcp_decode.kernels.warpgroup_query import QUERY_ASKED, WarpgroupQuery
from dcp_decode.kernels.warpgroup_scores import COMPUTE_THREADS, EMPTY
from dcp_decode.kernels.warpgroup_shared import KEY_TILE
from dcp_decode.kernels.warpgroup_values import WarpgroupValues

EMPTY_MAXIMUM = -0x7F800001  # -inf as an ordered integer


class SparseWarpgroups(SparseLaunch, WarpgroupQuery, WarpgroupGather, WarpgroupValues, WarpgroupOutputs):
    """The kernel specialised for one `WarpgroupConfig`."""

    config: WarpgroupConfig

    @cute.jit
    def initialise(self, thread: Int32, shared: Int32, barriers: Any) -> None:
        """mbarriers and what they expect, abort flag, maxima."""
        config = self.config
        layout = config.shared
        if thread == 0:
            for tile in cutlass.range_constexpr(layout.tiles):
                cute.arch.mbarrier_init(barriers + layout.key_barrier(tile) // 8, 1)
            if cutlass.const_expr(config.groups > 1):
                cute.arch.mbarrier_init(barriers + layout.keys_free_barrier // 8, config.groups)
            for offset, arrivals in self.output_barriers:
                cute.arch.mbarrier_init(barriers + offset // 8, arrivals)
            self.begin_outputs(barriers)
            cute.arch.mbarrier_init_fence()
            memory.store_shared(shared + layout.abort_flag, [Int32(0)])
        if thread < config.head_rows:
            memory.store_shared(shared + layout.maxima + thread * 4, [Int32(EMPTY_MAXIMUM)])

    @cute.jit
    def compute(self, arguments: SparseArguments, worker: Worker) -> None:
        """The compute warps: gather, attention, outputs."""
        index = self.load_index(arguments, worker, Int32(0))
        count = self.load_count(arguments, worker)
        keys = self.keys_of_cta(count, worker)
        if cutlass.const_expr(self.config.groups > 1):
            self.await_peers()
        # The query's loads go before the keys: they are few, and the first scores need them all.
        cute.arch.barrier(barrier_id=QUERY_ASKED, number_of_threads=self.config.staged_threads)
        if keys > 0:
            self.gather(index, keys, arguments, worker)
        self.stage_owners(arguments, worker)
        if cutlass.const_expr(self.config.groups == 1):
            self.await_peers()
        self.arrive_at_peers()
        cute.arch.barrier(barrier_id=QUERY_STAGED, number_of_threads=self.config.staged_threads)
        if count > 0:
            self.attend(keys, arguments, worker)
        else:
            self.empty_row(arguments, worker)
        self.await_peers()

    @cute.jit
    def attend(self, keys: Int32, arguments: SparseArguments, worker: Worker) -> None:
        """All chunks of this CTA's keys (perhaps none), then the outputs, for a row of count > 0.

        The first chunk has been gathered.
        """
        config = self.config
        scale_log2 = arguments.scale_log2
        accumulators = cute.make_rmem_tensor(config.head_rows, Float32)
        accumulators.fill(0.0)
        statistics = cute.make_rmem_tensor(2, Float32)  # running (max, sum) of head `thread`
        statistics[0] = Float32(EMPTY)
        statistics[1] = Float32(0.0)
        next_index = cute.make_rmem_tensor(1, Int32)
        next_index[0] = Int32(0)
        chunks = (keys + (config.chunk - 1)) // config.chunk
        for chunk in cutlass.range(chunks, unroll=1):
            left = keys - chunk * config.chunk
            if left > config.chunk:
                next_index[0] = self.load_index(arguments, worker, chunk + 1)
            self.attend_scores(chunk, left, scale_log2, worker)
            # P and the sums are complete.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            self.count_chunk(statistics, scale_log2, worker)
            if chunk > 0:
                self.rescale(accumulators, scale_log2, worker)
            self.values(accumulators, left, worker)
            if left > config.chunk:
                # Keys and P have been read.
                cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
                self.keep_maximum(statistics, worker)
                self.await_free_keys(chunk, worker)
                self.gather(next_index[0], left - config.chunk, arguments, worker)
        self.store_statistics(statistics, worker)
        self.finish_row(accumulators, arguments, worker)

    @cute.jit
    def attend_scores(self, chunk: Int32, left: Int32, scale_log2: Float32, worker: Worker) -> None:
        """Scores and P of a chunk of which `left` keys are left."""
        layout = self.config.shared
        scores = cute.make_rmem_tensor(self.config.head_rows // 2, Float32)
        scores.fill(0.0)
        tile = self.tile_of(worker)
        if tile * KEY_TILE < left:
            memory.wait_barrier(worker.shared + layout.key_barrier(0) + tile * 8, chunk & 1)
            self.hold(scores, self.scores(worker))
        if cutlass.const_expr(layout.depths > 1):
            if worker.warp >= self.softmax_warps:
                self.store_partial(self.held(scores), worker)
            self.meet()
            if worker.warp < self.softmax_warps:
                self.hold(scores, self.add_partials(self.held(scores), worker))
        if worker.warp < self.softmax_warps:
            self.hold(scores, self.mask_scores(self.held(scores), left, worker))
            self.raise_maxima(self.held(scores), worker)
        # The maxima are complete, and all keys have been read. A barrier of all compute warps, though only those of the
        # softmax have stored, and joined at one place: compute-sanitizer takes one of some of them for a race across
        # later barriers, and one that they join at two places for divergence.
        self.meet()
        self.clear_missing(left, worker)
        if worker.warp < self.softmax_warps:
            self.store_softmax(self.held(scores), scale_log2, worker)
