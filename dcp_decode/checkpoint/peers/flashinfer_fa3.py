"""FlashInfer's FA3 MLA decode with an E4M3 cache of one scale: the public kernel that reads our flat rows as they are.

The package compiles its module when it is first used (half a minute with nvcc 13.0 and ninja). A machine without them
needs it built ahead: as `data/aot/NAME/NAME.so` in the package, where it is loaded from first. The selected rows go in
through `plan`, on the host, once a selection; only `run` is timed.

Measured with 0.7.2.post1, its module built ahead (`results/checkpoint-h200-20261130.json`).
"""

from __future__ import annotations

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.peers.adapter import Candidate, PeerFacts, PeerSkipped, require
from dcp_decode.checkpoint.ranks import BenchRanks

WORKSPACE_BYTES = 128 << 20
PACKAGE = "flashinfer-python"


class FlashInferFa3:
    facts = PeerFacts(
        name="flashinfer_fa3_fp8",
        kind="public",
        bytes_per_key=numerics.ROW_BYTES,
        lse_base="2",
        combine="included, in the same cooperative kernel",
        source=PACKAGE,
    )

    def candidates(self, ranks: BenchRanks) -> list[Candidate]:
        library = require("flashinfer", PACKAGE)
        planning = require("flashinfer.mla", PACKAGE).MLAPlanMetadata
        problem, g, batch = ranks.problem, ranks.geometry, ranks.batch
        keys = problem.shape.keys
        offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
        rows = torch.empty((batch, g.heads, numerics.LATENT_DIM), dtype=torch.bfloat16, device="cuda")
        lse = torch.empty((batch, g.heads), device="cuda")
        cache = problem.caches.e4m3.view(torch.float8_e4m3fn)

        def planned(selection: torch.Tensor) -> object:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
            wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
            wrapper.plan(
                metadata=planning.csr(
                    qo_indptr=offsets,
                    kv_indptr=offsets * keys,
                    kv_indices=selection.flatten().contiguous(),
                    kv_len_arr=lengths,
                ),
                num_heads=g.heads,
                head_dim_ckv=numerics.LATENT_DIM,
                head_dim_kpe=numerics.ROPE_DIM,
                page_size=1,
                causal=False,
                sm_scale=g.softmax_scale,
                q_data_type=torch.bfloat16,
                kv_data_type=torch.float8_e4m3fn,
                query_layout="packed",
                kv_cache_layout="packed",
                lse_mode="base2",
            )
            return wrapper

        try:
            wrappers = [planned(selection) for selection in problem.indices]
        except Exception as error:  # of a build that needs nvcc, ninja or a network: any kind
            raise PeerSkipped(f"{PACKAGE} can't build its module: {' '.join(str(error).split())[:200]}") from None

        def launch(layer: int) -> None:
            wrappers[layer % len(wrappers)].run(  # type: ignore[attr-defined]
                query=problem.query,
                kv_cache=problem.part_of(cache, layer)[:, None],
                out=rows,
                lse=lse,
                return_lse=True,
                ckv_scale=g.k_scale,
                kpe_scale=g.k_scale,
            )

        return [Candidate("", launch, lambda: (rows, lse), -(-g.heads // 128) * 128, ranks.prepare_eviction)]
