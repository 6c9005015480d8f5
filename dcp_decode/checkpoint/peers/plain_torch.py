"""Plain torch: gather the rows, dequantize, two batched products around a softmax; seven kernels or more."""

from __future__ import annotations

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.peers.adapter import Candidate, LatestOutputs, PeerFacts
from dcp_decode.checkpoint.ranks import BenchRanks


class PlainTorch:
    facts = PeerFacts(
        name="torch",
        kind="public",
        bytes_per_key=numerics.ROW_BYTES,
        lse_base="e",
        combine="none needed (keys are not split)",
        source="torch",
    )

    def candidates(self, ranks: BenchRanks) -> list[Candidate]:
        problem, g = ranks.problem, ranks.geometry
        keys = problem.shape.keys
        slots = [indices.flatten().to(torch.int64) for indices in problem.indices]
        outputs = LatestOutputs()

        def launch(layer: int) -> None:
            flat = problem.part_of(problem.caches.e4m3, layer).index_select(0, slots[layer % len(slots)])
            rows = flat.view(torch.float8_e4m3fn).to(torch.bfloat16).view(-1, keys, numerics.ROW_BYTES)
            logits = torch.bmm(problem.query, rows.mT).float() * (g.softmax_scale * g.k_scale)
            lse = torch.logsumexp(logits, -1)
            weights = torch.exp(logits - lse[..., None]).to(torch.bfloat16)
            outputs.keep(torch.bmm(weights, rows[..., : numerics.LATENT_DIM]) * g.k_scale, lse)

        return [Candidate("", launch, outputs, g.heads, ranks.prepare_eviction)]
