"""What every sparse decode shares: how it is launched, and which of its warps do what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

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

    # Its kind's parts: from the set-up to the dependency wait; the query warps; all other warps; what all do last.
    begin: Callable[[], Worker]
    serve_query: Callable[[SparseArguments, Worker], None]
    compute: Callable[[SparseArguments, Worker], None]
    end: Callable[[], None]
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
        return shape if config.cluster == (1, 1, 1) else shape | {"cluster": list(config.cluster)}


def example_arguments() -> tuple[Any, ...]:
    """Typed arguments of a compiled sparse decode, without the stream: for compilation and export."""
    address = Int64(0)
    return (
        address, address, Int32(0), address, address, address, address, address, Float32(1.0), Float32(1.0), Int64(0),
    )  # fmt: skip
