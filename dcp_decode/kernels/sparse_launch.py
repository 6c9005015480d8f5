"""What every sparse decode shares: how it is launched, and which of its warps do what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute

from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_refusal import SparseRefusal, SparseRefused


class SparseLaunch:
    """Base of the sparse decodes."""

    def __init__(self, config: Any) -> None:
        """config: of any sparse decode (`sparse_layout.DecodeConfig`). Raises SparseRefused."""
        refusal = self.can_implement(config)
        if refusal is not None:
            raise SparseRefused(refusal)
        self.config = config

    @staticmethod
    def can_implement(config: Any) -> SparseRefusal | None:
        """None, or the typed reason why this configuration is refused."""
        return config.refusal()

    # Its kind's parts: barriers and first words of a CTA; the query warps; all other warps.
    initialise: Callable[[Int32, Int32, Any], None]
    serve_query: Callable[[SparseArguments, Worker], None]
    compute: Callable[[SparseArguments, Worker], None]
    counted_from: Callable[[Worker, int], Worker]

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
        """Launch over (split, heads, batch rows); arguments as in `launch.run_sparse`, addresses as integers."""
        self.kernel(
            SparseArguments(region, table, rank, kv, rows, valid, latent, lse, scale_log2, out_scale, deadline)
        ).launch(**self.launch_shape, stream=stream)

    @cute.kernel
    def kernel(self, arguments: SparseArguments) -> None:
        worker = self.begin()
        if worker.warp >= self.config.first_query_warp:
            self.serve_query(arguments, self.counted_from(worker, self.config.first_query_warp))
        else:
            self.compute(arguments, worker)
        self.end()

    @cute.jit
    def begin(self) -> Worker:
        """Set-up of a CTA, its first cluster arrival, and the wait for the kernels before it."""
        thread, _, _ = cute.arch.thread_idx()
        split, tile_group, row = cute.arch.block_idx()
        memory = cute.arch.get_dyn_smem(Uint8, alignment=1024)
        barriers = cute.recast_ptr(memory, dtype=Int64)
        shared = Int32(memory.toint())
        self.initialise(thread, shared, barriers)
        self.arrive_at_peers()
        if cutlass.const_expr(self.config.trigger == "start"):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        warp = cute.arch.make_warp_uniform(thread // 32)
        return Worker(row, tile_group, split, thread, warp, thread % 32, shared, barriers)

    @cute.jit
    def end(self) -> None:
        """What all threads do last."""
        if cutlass.const_expr(self.config.trigger == "end"):
            cute.arch.griddepcontrol_launch_dependents()

    @property
    def clustered(self) -> bool:
        """Whether a CTA has peers."""
        return self.config.cluster != (1, 1, 1)

    def arrive_at_peers(self) -> None:
        """The cluster barrier, first: this CTA's mbarriers are initialised; then: it has its query words."""
        if self.clustered:
            cute.arch.cluster_arrive_relaxed()

    def await_peers(self) -> None:
        """All CTAs of the cluster have arrived."""
        if self.clustered:
            cute.arch.cluster_wait()

    @property
    def launch_shape(self) -> dict[str, Any]:
        """Grid, CTA, cluster and what they hold: keyword arguments of a launch."""
        config = self.config
        shape = {
            "grid": config.grid,
            "block": [config.threads, 1, 1],
            "smem": config.shared_bytes,
            "use_pdl": config.pdl,
            # Stated both, or ptxas spills a few registers of some variants.
            "max_number_threads": [config.threads, 1, 1],
            "min_blocks_per_mp": 1,
        }
        return shape | {"cluster": list(config.cluster)} if self.clustered else shape


def example_arguments() -> tuple[Any, ...]:
    """Typed arguments of a compiled sparse decode, without the stream: for compilation and export."""
    address = Int64(0)
    return (
        address, address, Int32(0), address, address, address, address, address, Float32(1.0), Float32(1.0), Int64(0),
    )  # fmt: skip
