"""SparseDcpDecode: sparse MLA decode of one DCP layer over this rank's share of every row's top-k keys.

A cluster of SPLIT = 4 CTAs serves (16 t heads, row); CTA s takes the row's keys s, s + 4, s + 8 .. in chunks of 64:

    query mailbox --query warps--> shared | flat cache --16 warps x 4 bulk copies a chunk--> shared (2 buffers)
                                          v
    scores (depths x key groups) -> softmax (a warp a head) -> P bytes -> values (a warp 32 columns), FP32 registers
                                          v after the last chunk
    partials --st.async--> the CTA that merges their columns --BF16, LSE--> owners' value mailboxes | latent, lse

Rooms: `sparse_config` (choices, shared memory, refusals), `sparse_query` (arrival, re-arm, fence), `sparse_chunk`
(gather, scores, softmax, values), `sparse_merge` (exchange, merge, outputs). Nothing is read from global memory before
`griddepcontrol.wait`; the generation is the use counter modulo the generations; one thread advances the
query stage's counter.

One accumulation order for the whole family `seed`: every product is f16 x f16 + FP32 (E4M3 unpacked exactly), products
and sums outside the tensor cores are mul.rn / add.rn / fma.rn, so tiles, bulk, buffers and routes share every bit.

Measured on one H200 (132 SMs, driver 580, CUDA graph with programmatic dependent launch, solo rank, slope between
graphs of 10 and 40 launches, 96 heads; three machines, within 3 %). Registers: 96 / 113 / 126 for tiles 1 / 2 / 3:

    B x keys            5 x 256 hot  cold  1 x 256  40 x 256  5 x 0  5 x 512  5 x 2048  40 x 2048
    us                  5.14 - 5.20  5.8   4.9      32.2      3.1    6.8      17.4      104

    5 x 256 without: the use counter -0.18, the fence -0.03, the re-arm 0, the push of the rows instead of local -0.1
    to -0.3; with: bulk exchange +0.4, no dependent launch +0.55, one key buffer 0, two tiles +2.5.

Tried and dropped:
* `fence.acq_rel.sys` by 512 polling threads: 5.2 -> 6.6 us wherever it stood; hence the query warps (sparse_query).
* Loading the query of both generations before the counter is known: hides 0.2 us of latency, costs 0.2 us of L2.
* Reallocating registers from query to compute warps (setmaxnreg): 96 suffice for one tile; the pool is what the CTA
  started with (640 x 96), and asking for more waits for ever.
* Fewer unpacking instructions: with none at all (wrong results) only 0.14 us less; they don't bound the kernel.
* Launching dependents at the start, before the merge or at the end: equal for a solo kernel; static choice `trigger`.
* Double-buffered keys gain nothing at one chunk and 1 us of 18 at eight: latency of the two barriers, softmax and MMA
  chains bounds a chunk (1.8 us), not the gather. A software pipeline over chunks is the open idea there; at one chunk
  it is the exchange (24 KB in and out of a CTA over DSMEM).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from dcp_decode.kernels import arrival, disk_cache, ptx
from dcp_decode.kernels.sparse_chunk import VALUE_STEP, SparseChunk, store_fp8_pair_shared, transpose4
from dcp_decode.kernels.sparse_config import (
    CHUNK,
    ROW_PITCH,
    SPLIT,
    WARPS,
    SparseConfig,
    SparseRefusal,
    SparseRefused,
    can_implement,
    sparse_config,
    sparse_for,
    sparse_layout,
)
from dcp_decode.kernels.sparse_merge import SparseMerge
from dcp_decode.kernels.sparse_query import SparseQuery
from dcp_decode.mailbox import Stage

__all__ = [
    "SparseDcpDecode",
    "compile_sparse",
    "sparse_config",
    "sparse_for",
    "sparse_layout",
    "store_fp8_pair_shared",
    "transpose4",
]


# Named barriers of a CTA: all warps; the query has been staged; the compute warps alone.
QUERY_STAGED = 1
COMPUTE = 2
QUERY_WARPS_DONE = 3
COMPUTE_THREADS = 32 * WARPS


class SparseDcpDecode(SparseQuery, SparseChunk, SparseMerge):
    """The kernel specialised for one `SparseConfig`."""

    def __init__(self, config: SparseConfig) -> None:
        refusal = self.can_implement(config)
        if refusal is not None:
            raise SparseRefused(refusal)
        self.config = config

    @staticmethod
    def can_implement(config: SparseConfig) -> SparseRefusal | None:
        """None, or the typed reason why this configuration is refused."""
        return can_implement(config)

    @cute.jit
    def __call__(
        self,
        region: Int64,
        table: Int64,
        rank: Int32,
        kv: Int64,
        rows: Int64,
        valid: Int64,
        latent: Int64,
        lse: Int64,
        scale_log2: Float32,
        out_scale: Float32,
        deadline: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launch over (SPLIT, head tiles, batch rows); arguments as in `launch.run_sparse`, addresses as integers."""
        self.kernel(region, table, rank, kv, rows, valid, latent, lse, scale_log2, out_scale, deadline).launch(
            grid=self.config.grid,
            block=[self.config.threads, 1, 1],
            cluster=[SPLIT, 1, 1],
            smem=self.config.shared.nbytes,
            use_pdl=self.config.pdl,
            # Stated both, or ptxas spills a few registers of some variants.
            max_number_threads=[self.config.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        region: Int64,
        table: Int64,
        rank: Int32,
        kv: Int64,
        rows: Int64,
        valid: Int64,
        latent: Int64,
        lse: Int64,
        scale_log2: Float32,
        out_scale: Float32,
        deadline: Int64,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        split, tile_group, row = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        memory = cute.arch.get_dyn_smem(Uint8, alignment=1024)
        shared = Int32(memory.toint())
        barriers = cute.recast_ptr(memory, dtype=Int64)
        if thread == 0:
            for barrier in cutlass.range_constexpr(1 + config.buffers):
                cute.arch.mbarrier_init(barriers + barrier, 1)
            # Orders the initialisation before the relaxed cluster arrival for the peers' st.async and bulk copies.
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barriers, self.inbox_bytes)
            ptx.store_shared(shared + config.shared.abort_flag, [Int32(0)])
        cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(config.trigger == "start"):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        use = arrival.read_use(region, int(Stage.SPARSE))
        if cutlass.const_expr(config.query_warps > 0):
            if warp >= WARPS:
                self.serve_query(region, rank, use, deadline, row, tile_group, split, thread - COMPUTE_THREADS, shared)
            else:
                self.compute(
                    region, table, rank, kv, rows, valid, latent, lse, scale_log2, out_scale, deadline, use, row,
                    tile_group, split, thread, shared, barriers,
                )  # fmt: skip
        else:
            self.compute(
                region, table, rank, kv, rows, valid, latent, lse, scale_log2, out_scale, deadline, use, row,
                tile_group, split, thread, shared, barriers,
            )  # fmt: skip
        if cutlass.const_expr(config.trigger == "end"):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(config.bulk):
            # The peers have received the copies out of this CTA's staged partials.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def compute(
        self,
        region: Int64,
        table: Int64,
        rank: Int32,
        kv: Int64,
        rows: Int64,
        valid: Int64,
        latent: Int64,
        lse: Int64,
        scale_log2: Float32,
        out_scale: Float32,
        deadline: Int64,
        use: Int32,
        row: Int32,
        tile_group: Int32,
        split: Int32,
        thread: Int32,
        shared: Int32,
        barriers: cute.Pointer,
    ) -> None:
        """The 16 compute warps: gather, attention, outputs; in wide CTAs they serve the query as well."""
        config = self.config
        warp = cute.arch.make_warp_uniform(thread // 32)
        lane = thread % 32
        # First level of loads: neither depends on the other.
        count = ptx.load_global_int32(valid + Int64(row) * 4)
        index = self.load_index(rows, row, split, Int32(0), warp, lane)
        count = ptx.minimum_int32(ptx.maximum_int32(count, Int32(0)), Int32(config.geometry.topk))
        # Key j of the row goes to CTA j % SPLIT.
        keys = (count - split + (SPLIT - 1)) // SPLIT
        if keys > 0:
            self.gather(kv, index, Int32(0), keys, warp, lane, shared, barriers)
        if cutlass.const_expr(config.query_warps == 0):
            address = self.query_address(region, use, row, tile_group)
            self.receive_query(address, region, rank, use, deadline, row, tile_group, thread, shared)
            self.advance_query_use(region, split, tile_group, row, thread)
        # The peers' barriers are initialised: their first arrival. The second one completes only when the threads that
        # poll have arrived too, each after its last poll; waiting here hides the barrier behind the query.
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier(barrier_id=QUERY_STAGED, number_of_threads=config.threads)
        if count > 0:
            self.attend(
                kv, rows, table, latent, lse, index, keys, scale_log2, out_scale, rank, use, row, tile_group,
                split, warp, lane, shared, barriers,
            )  # fmt: skip
        else:
            self.empty_row(table, latent, lse, rank, use, row, tile_group, split, warp, lane, shared)
        cute.arch.cluster_wait()
        if cutlass.const_expr(config.query_warps == 0):
            # The use number is read again: kept, the address would cost the two registers that three tiles lack.
            address = self.query_address(region, arrival.read_use(region, int(Stage.SPARSE)), row, tile_group)
            self.release_query(address, split, thread, shared)

    @cute.jit
    def serve_query(
        self,
        region: Int64,
        rank: Int32,
        use: Int32,
        deadline: Int64,
        row: Int32,
        tile_group: Int32,
        split: Int32,
        thread: Int32,
        shared: Int32,
    ) -> None:
        """The query warps of a one-tile CTA, from the first load to the fence; also for rows of count 0."""
        address = self.query_address(region, use, row, tile_group)
        self.receive_query(address, region, rank, use, deadline, row, tile_group, thread, shared)
        cute.arch.barrier_arrive(barrier_id=QUERY_STAGED, number_of_threads=self.config.threads)
        self.advance_query_use(region, split, tile_group, row, thread)
        # First arrival of the peers (their barriers), then: this CTA has its words, do the others?
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier(barrier_id=QUERY_WARPS_DONE, number_of_threads=self.config.query_threads)
        cute.arch.cluster_wait()
        self.release_query(address, split, thread, shared)

    @cute.jit
    def attend(
        self,
        kv: Int64,
        rows: Int64,
        table: Int64,
        latent: Int64,
        lse: Int64,
        first_index: Int32,
        keys: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        rank: Int32,
        use: Int32,
        row: Int32,
        tile_group: Int32,
        split: Int32,
        warp: Int32,
        lane: Int32,
        shared: Int32,
        barriers: cute.Pointer,
    ) -> None:
        """All chunks of this CTA's keys (perhaps none), then the cluster's merge, for a row of count > 0."""
        config = self.config
        accumulators = cute.make_rmem_tensor(16 * config.tiles, Float32)
        running_max = cute.make_rmem_tensor(config.tiles, Float32)
        running_sum = cute.make_rmem_tensor(config.tiles, Float32)
        accumulators.fill(0.0)
        running_max.fill(float("-inf"))
        running_sum.fill(0.0)
        next_index = cute.make_rmem_tensor(1, Int32)
        next_index[0] = Int32(0)
        query = None
        if cutlass.const_expr(self.query_in_registers):
            query = self.query_operands(warp, lane, shared)
        chunks = (keys + (CHUNK - 1)) // CHUNK
        if chunks > 1:
            next_index[0] = self.load_index(rows, row, split, Int32(1), warp, lane)
        for chunk in cutlass.range(chunks, unroll=1):
            left = keys - chunk * CHUNK
            buffer = chunk % config.buffers
            base = shared + config.shared.keys + buffer * (CHUNK * ROW_PITCH)
            if cutlass.const_expr(config.buffers == 2):  # noqa: SIM102 (a static and a dynamic condition)
                # The other buffer is free: all its readers passed the first barrier of the previous chunk.
                if left > CHUNK:
                    self.gather(kv, next_index[0], chunk + 1, left - CHUNK, warp, lane, shared, barriers)
                    next_index[0] = self.load_index(rows, row, split, chunk + 2, warp, lane)
            cute.arch.mbarrier_wait(barriers + (1 + buffer), chunk // config.buffers % 2)
            self.scores(query, base, warp, lane, shared)
            value_words = self.load_values(base, left, warp, lane)
            # Partial scores are complete, and the key buffer has been read.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            if cutlass.const_expr(config.buffers == 1):  # noqa: SIM102
                if left > CHUNK:
                    self.gather(kv, next_index[0], chunk + 1, left - CHUNK, warp, lane, shared, barriers)
                    next_index[0] = self.load_index(rows, row, split, chunk + 2, warp, lane)
            self.softmax(running_max, running_sum, left, scale_log2, warp, lane, shared)
            # While other warps are still in the softmax.
            values = [self.transpose_values(value_words, step) for step in range(2)]
            # P and the rescale factors are complete, and the scores have been read.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            if chunk > 0:
                self.rescale_accumulators(accumulators, lane, shared)
            self.values(accumulators, values[0], 0, lane, shared)
            if left > VALUE_STEP:
                self.values(accumulators, values[1], 1, lane, shared)

        owner_bases = self.owner_bases(table, tile_group, warp)
        if cutlass.const_expr(config.bulk):
            self.stage(accumulators, split, warp, lane, shared)
            self.send_statistics(running_max, running_sum, split, warp, lane, shared)
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
            self.send_staged(split, warp, lane, shared)
        else:
            self.exchange(accumulators, split, warp, lane, shared)
            self.send_statistics(running_max, running_sum, split, warp, lane, shared)
            # This CTA's own partials are complete.
            cute.arch.barrier(barrier_id=COMPUTE, number_of_threads=COMPUTE_THREADS)
        if cutlass.const_expr(config.trigger == "merge"):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.mbarrier_wait(barriers, 0)
        for tile in cutlass.range_constexpr(config.tiles):
            owner_base = owner_bases[tile] if config.push else Int64(0)
            self.merge(tile, owner_base, latent, lse, out_scale, rank, use, row, tile_group, split, warp, lane, shared)


@cache
def compile_sparse(config: SparseConfig) -> disk_cache.JitKernel:
    """The compiled kernel of a configuration (cached); `SparseRefused` when it is refused.

    The architecture compiled for is that of the CuTe DSL (`CUTE_DSL_ARCH`, else the device's).
    """
    return disk_cache.compile_kernel(SparseDcpDecode(config), example_arguments())


def example_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled kernel, without the stream: for compilation and export."""
    address = Int64(0)
    return (
        address, address, Int32(0), address, address, address, address, address, Float32(1.0), Float32(1.0), Int64(0),
    )  # fmt: skip
