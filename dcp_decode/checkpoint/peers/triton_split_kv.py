"""Our own baseline in Triton: grouped heads, keys split over programs, an LSE combine; E4M3 rows, BF16 products.

The candidates are the best of a wide search on an H200 for five shapes, each with and without dependent launch; the
fastest at a point counts, so the baseline is tuned in the very run that it is compared in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.peers.adapter import Candidate, PeerFacts, PeerSkipped, require
from dcp_decode.checkpoint.ranks import BenchRanks

COMBINE_WARPS = 4
PACKAGE = "triton"


@dataclass(frozen=True)
class Tiling:
    """Heads of a program, keys of a block, warps, pipeline stages, and parts that a row's keys are split into."""

    group: int
    block: int
    warps: int
    stages: int
    parts: int

    def fits(self, keys: int) -> bool:
        return keys >= self.parts * self.block


TILINGS = (
    Tiling(16, 32, 4, 1, 8),
    Tiling(16, 32, 4, 2, 8),
    Tiling(16, 64, 8, 1, 4),
    Tiling(32, 64, 8, 1, 4),
    Tiling(32, 64, 8, 1, 1),
    Tiling(32, 32, 4, 2, 16),
)


class TritonSplitKv:
    facts = PeerFacts(
        name="triton_split_kv",
        kind="own",
        bytes_per_key=numerics.ROW_BYTES,
        lse_base="2",
        combine="included, a second kernel where keys are split",
        source="dcp_decode.checkpoint.triton_kernels",
    )

    def candidates(self, ranks: BenchRanks) -> list[Candidate]:
        require("triton", PACKAGE)
        fitting = [tiling for tiling in TILINGS if tiling.fits(ranks.problem.shape.keys)]
        if not fitting:
            raise PeerSkipped(f"no tiling for {ranks.problem.shape.keys} keys")
        return [_candidate(ranks, tiling, pdl) for tiling in fitting for pdl in (False, True)]


def _candidate(ranks: BenchRanks, tiling: Tiling, pdl: bool) -> Candidate:
    from dcp_decode.checkpoint import triton_kernels

    problem, g, batch = ranks.problem, ranks.geometry, ranks.batch
    keys = problem.shape.keys
    rows = torch.empty((batch, g.heads, numerics.LATENT_DIM), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty((batch, g.heads), device="cuda")
    part_rows, part_lse = rows, lse
    if tiling.parts > 1:
        part_rows = torch.empty((batch, tiling.parts, g.heads, numerics.LATENT_DIM), device="cuda")
        part_lse = torch.empty((batch, tiling.parts, g.heads), device="cuda")
    part_keys = -(-keys // tiling.parts)
    cache = problem.caches.e4m3.view(torch.float8_e4m3fn)
    dependent = {"launch_pdl": True} if pdl else {}

    def launch(layer: int) -> None:
        triton_kernels.split_attention[(batch, -(-g.heads // tiling.group), tiling.parts)](
            problem.query,
            problem.part_of(cache, layer),
            problem.indices_of(layer),
            part_rows,
            part_lse,
            g.softmax_scale * g.k_scale * numerics.LOG2_E,
            g.k_scale,
            keys,
            part_keys,
            HEADS=g.heads,
            PARTS=tiling.parts,
            GROUP=tiling.group,
            BLOCK=tiling.block,
            STAGES=tiling.stages,
            EVEN=keys % (tiling.parts * tiling.block) == 0,
            PDL=pdl,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **dependent,
        )
        if tiling.parts > 1:
            triton_kernels.combine_parts[(batch, g.heads)](
                part_rows, part_lse, rows, lse, HEADS=g.heads, PARTS=tiling.parts, PDL=pdl, num_warps=COMBINE_WARPS,
                **dependent,
            )  # fmt: skip

    label = f"{tiling.group} heads x {tiling.block} keys, {tiling.parts} parts{', dependent launch' if pdl else ''}"
    padded = -(-g.heads // tiling.group) * tiling.group
    return Candidate(label, launch, lambda: (rows, lse), padded, ranks.prepare_eviction)
