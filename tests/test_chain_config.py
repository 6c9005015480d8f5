"""The fused chain's refusals, and that its CTAs share out every piece of query and every own head exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.chain_config import (
    ChainRefusalReason,
    can_implement,
    chain_config,
    chain_for,
)
from dcp_decode.kernels.sparse_layout import WAVE_OF_CLUSTERS, waves
from dcp_decode.kernels.sparse_shared import SPLIT

GEOMETRIES = [
    (Geometry(capacity=5), 5),
    (Geometry(capacity=5), 1),
    (Geometry(heads=128, padded_heads=128, capacity=9), 3),
    (Geometry(heads=64, dcp=4, padded_heads=64), 5),
    (Geometry(heads=96, dcp=2), 3),
    (Geometry(heads=96, dcp=1), 2),
]


@pytest.mark.parametrize(("geometry", "batch"), GEOMETRIES)
def test_every_piece_and_every_head_has_one_owner(geometry: Geometry, batch: int) -> None:
    chain = chain_config(geometry, batch, tiles=1)
    assert can_implement(chain) is None
    pushed: Counter[tuple[int, int]] = Counter()
    for cta in range(batch * chain.ctas_a_row):
        for warp in range(chain.sparse.query_warps):
            peers = range(warp * chain.peers_a_warp, (warp + 1) * chain.peers_a_warp)
            for within in range(32 * chain.push_turns):
                piece = cta * chain.pieces_a_cta + within
                if within < chain.pieces_a_cta and piece < chain.pieces and peers.start < geometry.dcp:
                    pushed.update((piece, peer) for peer in peers)
    assert pushed == Counter({(piece, peer): 1 for piece in range(chain.pieces) for peer in range(geometry.dcp)})
    # A CTA pushes pieces of its own row only, so a row waits for no other row's CTAs.
    assert chain.pieces_a_cta * chain.ctas_a_row == chain.pieces // batch


@pytest.mark.parametrize(
    ("geometry", "batch", "choices", "reason"),
    [
        (Geometry(), 6, {"tiles": 1}, ChainRefusalReason.WAVE),
        (Geometry(heads=128, padded_heads=128), 4, {"tiles": 1}, ChainRefusalReason.WAVE),
        (Geometry(), 5, {"tiles": 2}, ChainRefusalReason.TILES),
        (Geometry(heads=64, dcp=16, padded_heads=64), 1, {"tiles": 1}, ChainRefusalReason.SOURCES),
        (Geometry(capacity=2), 3, {"tiles": 1}, ChainRefusalReason.SPARSE),
    ],
)
def test_refusals_name_their_reason_and_values(
    geometry: Geometry, batch: int, choices: dict, reason: ChainRefusalReason
) -> None:
    refusal = can_implement(chain_config(geometry, batch, **choices))
    assert refusal is not None
    assert refusal.reason is reason
    assert str(refusal).startswith(f"fused chain: {reason.value} (")


def test_the_local_route_and_unfit_devices_are_refused() -> None:
    chain = chain_config(Geometry(), 5, tiles=1)
    refusal = can_implement(replace(chain, sparse=replace(chain.sparse, push=False)))
    assert refusal is not None
    assert refusal.reason is ChainRefusalReason.ROUTE
    for own_device, multiprocessors, reason in (
        (False, 132, ChainRefusalReason.SHARED_DEVICE),
        (True, 114, ChainRefusalReason.MULTIPROCESSORS),
    ):
        refusal = chain_for(Geometry(), 5, own_device, multiprocessors)
        assert refusal is not None
        assert refusal.reason is reason
    assert chain_for(Geometry(), 5, own_device=True, multiprocessors=132) is None


def test_the_largest_batch_of_the_checkpoint_fills_one_wave() -> None:
    chain = chain_config(Geometry(), 5, tiles=1)
    size = SPLIT * chain.sparse.groups
    assert chain.batch * chain.ctas_a_row == size * WAVE_OF_CLUSTERS[size]
    assert waves(WAVE_OF_CLUSTERS[size] + 1, size) == 2
