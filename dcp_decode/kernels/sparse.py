"""SparseDcpDecode: sparse MLA decode of one DCP layer over this rank's share of every row's top-k keys.

A cluster of SPLIT = 4 CTAs serves (16 t heads, row); CTA s scores the row's keys s, s + 4, s + 8 .. in chunks of 64
or, with the exchange of probabilities, of 128.
What the CTAs then send each other is a choice, with a family of bits each:

    partials         FP32 sums over the own keys to the CTA that merges their columns      24 KB a CTA and tile, once
    probabilities    E4M3 P of the own keys to all; each sums its own columns over all     3 KB a CTA and tile, a round

    query mailbox --query warps--> shared | flat cache --bulk copies, cp.async--> shared
                                          v
    scores (depths x key groups) -> softmax (a warp a head) -> P bytes -> values, FP32 registers
                                          v
    merged rows: BF16, LSE --> owners' value mailboxes | latent, lse

Rooms: `sparse_config` (choices), `sparse_shared` (shared memory), `sparse_chunk` (scores, softmax), `sparse_partials`,
`sparse_gather`, `sparse_values` and `sparse_probabilities` (the exchanges), `sparse_outputs`; for every sparse decode
`sparse_layout` (which one a batch runs), `sparse_refusal`, `sparse_launch`, `sparse_query` (arrival, re-arm, fence) and
`sparse_rows` (what is read of a row, where its outputs go).

Nothing is read from global memory before `griddepcontrol.wait`; the generation is the use counter modulo the
generations, read by the query warps only; one thread advances the query stage's counter.

Every product is f16 x f16 + FP32 (E4M3 unpacked exactly), products and sums outside the tensor cores are mul.rn /
add.rn / fma.rn, so tiles, bulk, buffers and routes share every bit of a family.

Measured on one H200 (132 SMs, driver 580, CUDA graph with programmatic dependent launch, solo rank, slope between
graphs of 4 and 16 launches, 96 heads, 256 keys a row; several machines; medians vary by 0.4 us between runs at B = 5):

    us                       B = 1        5      5 cold       8         16        5 x 2048
    partials, 1 tile      4.6 - 4.9    4.6 - 5.1   5.6     9.4 - 9.6    19.3    17.0 - 17.7
    partials, 2 tiles                    7.6              8.6          17.1
    probabilities, 1      4.4 - 4.6    4.5 - 5.3   5.6     8.6          17.3    not measured
    probabilities, 2      6.7          6.9         7.2     7.3          14.5    not measured
    probabilities, 3      9.6          9.8        10.1     9.9          19.6    not measured

    B = 40: partials 32.2 (3 tiles), 35 (2); probabilities 29.8 (2 tiles, earlier build)

Where a row's time goes (probabilities, 5 x 256, SM clocks after the dependency wait, mean of all CTAs; 1 us = 1980):

    first loads back 870 | keys issued 1240 - 1600 | query staged 2260 | keys and query here 3070 | scores 3820 |
    barrier 3980 | P sent 4510 | P of all here 5780 | values 6800 | statistics 6870 | stored 7370

So two dependent loads before the query (use counter, words) and one before the keys cost as much as the arithmetic.
Since then (statistics sent while P is on its way, unpacking before the waits, two products at once, two head tiles that
copy their keys once: `groups` 2, short rows straight through code of their own): 3.60 / 3.97 us at B = 1 / 5, cold 4.42
at B = 5, with trigger "end"; "merge" is 0.15 us slower alone and 1 us faster in a chain of three launches. B = 5:

    keys                   64    256    264    288    384    400    512    528   1024   2048
    chunk 64             3.82   3.97   5.75   5.79   6.41   6.36   6.74   8.46  10.75  18.88
    chunk 128            3.96   4.06   5.09   5.05   5.21   6.14   6.07   9.57  11.43  23.46
    fused, chunk 64      5.49   5.72   7.44   7.46   7.52   7.45   7.67   9.38  11.88  20.14
    fused, chunk 128     5.42   5.65   6.41   6.43   6.57   7.38   7.50  10.86  12.48  24.30

(hot; cold at 256, 288, 384, 512: 4.42, 6.17, 6.78, 7.14 and 4.64, 5.51, 5.78, 6.79.) `sparse_layout` knows what a
batch runs: from six rows or 513 keys on that is `warpgroup` where the GPU has wgmma.

Tried and dropped:
* `fence.acq_rel.sys` by 512 polling threads: 5.2 -> 6.6 us wherever it stood; hence the query warps (sparse_query).
* Loading the query of both generations before the counter is known: no gain, with and without shared copies.
* Values gathered later, when the query or the keys are here: 0 to +0.15 us; other shares of the copies: +0.05.
* Prefetching the first loads before the dependency wait: +0.35 us. Triggering dependents from the query warps, as they
  end: as fast as "end" alone, but 1 us slower than "merge" in a chain of three.
* Reallocating registers from query to compute warps (setmaxnreg): the pool is what the CTA started with (640 x 96), and
  asking for more waits for ever.
* Exchange of partials: double-buffered keys gain nothing at one chunk and 1 us of 18 at eight; bulk exchange +0.4 us.
* Exchange of probabilities by 16 compute warps that gather too (two CTAs' values a warp): 5.2 us, 27 at 2048 keys, 4080
  instructions a scheduler (partials: 3280), of which three quarters are addresses and other work that every warp
  repeats; clusters of 8 or 2 CTAs were slower still (8.0 to 15.5 us at 5 x 256). Hence 8 compute and 4 gather warps.
* A second block of 64 keys in passes of its own after those of the first: 5.86 at 288 keys, the second round's time,
  because each pass waits for its own latency (scores 0.35, P 0.15, values 0.5). Zeros for absent values by a thread a
  key: their stores conflict, in the way of the bulk copies, 0.45 at 288 keys and 0.15 at 64.
* mbarrier waits without the time hint that CuTe DSL gives them: 0.05 us less.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cutlass
from cutlass import Int32, cute

from dcp_decode.kernels import disk_cache, memory
from dcp_decode.kernels.launch import run_sparse
from dcp_decode.kernels.sparse_arguments import QUERY_STAGED, QUERY_WARPS_DONE, SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import store_fp8_pair_shared, transpose4
from dcp_decode.kernels.sparse_config import COMPUTE_WARPS, SparseConfig
from dcp_decode.kernels.sparse_launch import SparseLaunch, example_arguments
from dcp_decode.kernels.sparse_layout import DecodeConfig, refuse_architecture, sparse_config, sparse_for, sparse_layout
from dcp_decode.kernels.sparse_partials import SparsePartials
from dcp_decode.kernels.sparse_probabilities import SparseProbabilities
from dcp_decode.kernels.sparse_query import SparseQuery
from dcp_decode.kernels.sparse_refusal import SparseRefused
from dcp_decode.kernels.sparse_shared import SPLIT
from dcp_decode.kernels.warpgroup import SparseWarpgroups
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig

# The kernel's whole interface, wherever its parts live.
__all__ = [
    "SparseDcpDecode",
    "compile_sparse",
    "run_sparse",
    "sparse_config",
    "sparse_for",
    "sparse_layout",
    "store_fp8_pair_shared",
    "transpose4",
]


class SparseDcpDecode(SparseLaunch, SparseQuery, SparsePartials, SparseProbabilities):
    """The kernel specialised for one `SparseConfig`."""

    config: SparseConfig

    @cute.jit
    def initialise(self, thread: Int32, shared: Int32, barriers: Any) -> None:
        """mbarriers and what they expect, abort flag."""
        config = self.config
        if thread == 0:
            for barrier, arrivals in enumerate(self.barrier_arrivals):
                cute.arch.mbarrier_init(barriers + barrier, arrivals)
            # Orders the initialisation before the relaxed cluster arrival for the peers' st.async and bulk copies.
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barriers, self.inbox_bytes)
            if cutlass.const_expr(config.exchange == "probabilities"):
                # With two blocks a round their bytes are known with the count.
                for parity in cutlass.range_constexpr(2 if config.blocks == 1 else 0):
                    self.expect_probabilities(barriers, parity, 0)
            memory.store_shared(shared + config.shared.abort_flag, [Int32(0)])

    @property
    def barrier_arrivals(self) -> list[int]:
        """Arrivals of every mbarrier in shared memory, in the order of the layouts."""
        inbox, keys = [1], [1, 1]
        if self.config.exchange == "partials":
            return inbox + keys
        values, probabilities, keys_free, values_free = [32 * self.config.gather_warps] * 2, [1, 1], [1, 1], [1, 1]
        return inbox + keys + values + probabilities + keys_free + values_free

    @property
    def inbox_bytes(self) -> int:
        """Bytes that the inbox barrier of every CTA counts: all CTAs' statistics, and the peers' partials."""
        statistics = SPLIT * self.config.head_rows * 8
        return statistics + (self.partials_bytes if self.config.exchange == "partials" else 0)

    @cute.jit
    def end(self) -> None:
        """What all threads do last."""
        SparseLaunch.end(self)
        if cutlass.const_expr(self.config.bulk):
            # The peers have received the copies out of this CTA's staged partials.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def compute(self, arguments: SparseArguments, worker: Worker) -> None:
        """All warps but the query warps: gather, attention, outputs; without query warps they serve the query too."""
        if cutlass.const_expr(self.config.exchange == "partials"):
            self.compute_partials(arguments, worker)
        elif worker.warp < COMPUTE_WARPS:
            self.compute_probabilities(arguments, worker)
        else:
            self.gather(arguments, self.counted_from(worker, COMPUTE_WARPS))
        cute.arch.cluster_wait()
        if cutlass.const_expr(self.config.query_warps == 0):
            # The address is formed again: kept, it would cost the two registers that three tiles lack.
            self.release_query(worker, self.query_address(arguments, worker, self.use_number(worker)))

    @cute.jit
    def compute_partials(self, arguments: SparseArguments, worker: Worker) -> None:
        """The 16 compute warps with the exchange of partials."""
        # First level of loads: neither depends on the other.
        count = self.load_count(arguments, worker)
        index = self.own_index(arguments, worker, Int32(0))
        keys = self.keys_of_cta(count, worker)
        if keys > 0:
            self.gather_chunk(index, Int32(0), keys, arguments, worker)
        if cutlass.const_expr(self.config.query_warps == 0):
            self.receive_and_publish(arguments, worker)
        # The peers' barriers are initialised: their first arrival. The second one completes only when the threads that
        # poll have arrived too, each after its last poll; waiting here hides the barrier behind the query.
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier(barrier_id=QUERY_STAGED, number_of_threads=self.config.staged_threads)
        if count > 0:
            self.attend_partials(keys, arguments, worker)
        else:
            self.empty_row(arguments, worker)

    @cute.jit
    def serve_query(self, arguments: SparseArguments, worker: Worker) -> None:
        """The query warps, from the first load to the fence; also for rows of count 0."""
        address = self.receive_and_publish(arguments, worker)
        cute.arch.barrier_arrive(barrier_id=QUERY_STAGED, number_of_threads=self.config.staged_threads)
        # First arrival of the peers (their barriers), then: this CTA has its words, do the others?
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier(barrier_id=QUERY_WARPS_DONE, number_of_threads=self.config.query_threads)
        cute.arch.cluster_wait()
        self.release_query(worker, address)


@cache
def compile_sparse(config: DecodeConfig) -> disk_cache.JitKernel:
    """The compiled kernel of a configuration (cached); `SparseRefused` when it is refused.

    The architecture compiled for is that of the CuTe DSL (`CUTE_DSL_ARCH`, else the device's).
    """
    kernel = SparseWarpgroups(config) if isinstance(config, WarpgroupConfig) else SparseDcpDecode(config)
    refusal = refuse_architecture(config, disk_cache.architecture())
    if refusal is not None:
        raise SparseRefused(refusal)
    return disk_cache.compile_kernel(kernel, example_arguments())
