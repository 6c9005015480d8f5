"""Our own sparse decode on the local route: latent rows and natural-log LSE stay on the rank, nothing is pushed."""

from __future__ import annotations

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.peers.adapter import Candidate, PeerFacts
from dcp_decode.checkpoint.ranks import DEADLINE_NANOSECONDS, BenchRanks, current_stream
from dcp_decode.checkpoint.variants import default_config
from dcp_decode.kernels.aot import architecture_of
from dcp_decode.kernels.launch import run_sparse
from dcp_decode.kernels.sparse import compile_sparse


class OwnLocalRoute:
    facts = PeerFacts(
        name="own_local_route",
        kind="own",
        bytes_per_key=numerics.ROW_BYTES,
        lse_base="e",
        combine="inside, over the cluster's shared memory",
        source="dcp_decode.kernels.sparse, route local",
    )

    def candidates(self, ranks: BenchRanks) -> list[Candidate]:
        g, batch, problem = ranks.geometry, ranks.batch, ranks.problem
        config = default_config(g, problem.shape, False, architecture_of(torch.device("cuda")))
        kernel = compile_sparse(config)
        latent = torch.empty((batch, g.padded_heads, numerics.LATENT_DIM), dtype=torch.bfloat16, device="cuda")
        lse_ln = torch.empty((batch, g.padded_heads), device="cuda")

        def launch(layer: int) -> None:
            run_sparse(
                kernel, ranks.mailboxes_of(layer)[0], problem.caches.e4m3, problem.rows_of(layer), problem.valid,
                latent, lse_ln, DEADLINE_NANOSECONDS, current_stream(),
            )  # fmt: skip

        return [Candidate("", launch, lambda: (latent, lse_ln), g.heads, ranks.prepare_alone, ranks.copies)]
