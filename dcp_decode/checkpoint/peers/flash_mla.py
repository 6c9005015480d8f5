"""FlashMLA's sparse kernels for sm_90, from the wheel `sgl-flash-mla`: the FP8 decode and the BF16 prefill.

Both take 64 or 128 query heads: 96 are padded, and padding is not in the time. The decode's scheduler metadata is made
by its first call at a shape, as once in a model's step, so it is not in the time either.
"""

from __future__ import annotations

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.peers.adapter import (
    Candidate,
    LatestOutputs,
    PeerFacts,
    PeerSkipped,
    padded_query,
    require,
)
from dcp_decode.checkpoint.ranks import BenchRanks

HEAD_COUNTS = (64, 128)
KEY_MULTIPLE = 64  # of the top-k width
PACKAGE = "sgl-flash-mla"


class FlashMlaSparseDecode:
    facts = PeerFacts(
        name="flash_mla_sparse_decode",
        kind="public",
        bytes_per_key=656,
        lse_base="e",
        combine="included, a second kernel (dependent launch)",
        source=PACKAGE,
    )

    def candidates(self, ranks: BenchRanks) -> list[Candidate]:
        library = require("flash_mla", PACKAGE)
        problem = ranks.problem
        heads = _padded_heads(ranks)
        query = padded_query(problem.query, heads)[:, None]  # (B, 1, heads, 576)
        schedule, _ = library.get_mla_metadata()
        outputs = LatestOutputs()

        def launch(layer: int) -> None:
            rows, lse = library.flash_mla_with_kvcache(
                query,
                problem.part_of(problem.caches.block_scaled, layer),
                None,
                None,
                numerics.LATENT_DIM,
                schedule,
                softmax_scale=ranks.geometry.softmax_scale,
                is_fp8_kvcache=True,
                indices=problem.indices_of(layer)[:, None],
                use_legacy=True,
            )
            outputs.keep(rows.flatten(0, 1), lse.flatten(1))

        return [Candidate("", launch, outputs, heads, ranks.prepare_eviction)]


class FlashMlaSparsePrefill:
    facts = PeerFacts(
        name="flash_mla_sparse_prefill",
        kind="public",
        bytes_per_key=2 * numerics.ROW_BYTES,
        lse_base="e",
        combine="none needed (keys are not split)",
        source=PACKAGE,
    )

    def candidates(self, ranks: BenchRanks) -> list[Candidate]:
        library = require("flash_mla", PACKAGE)
        problem = ranks.problem
        heads = _padded_heads(ranks)
        query = padded_query(problem.query, heads)
        outputs = LatestOutputs()

        def launch(layer: int) -> None:
            rows, _, lse = library.flash_mla_sparse_fwd(
                query,
                problem.part_of(problem.caches.bf16, layer)[:, None],
                problem.indices_of(layer)[:, None],
                ranks.geometry.softmax_scale,
                numerics.LATENT_DIM,
                use_legacy=True,
            )
            outputs.keep(rows, lse)

        return [Candidate("", launch, outputs, heads, ranks.prepare_eviction)]


def _padded_heads(ranks: BenchRanks) -> int:
    heads, keys = ranks.geometry.heads, ranks.problem.shape.keys
    if torch.cuda.get_device_capability()[0] != 9:
        raise PeerSkipped("the wheel's kernels are for compute capability 9.0")
    if keys % KEY_MULTIPLE:
        raise PeerSkipped(f"takes a multiple of {KEY_MULTIPLE} keys, not {keys}")
    fitting = [count for count in HEAD_COUNTS if count >= heads]
    if not fitting:
        raise PeerSkipped(f"takes at most {HEAD_COUNTS[-1]} heads, not {heads}")
    return fitting[0]
