"""Static choices of the sparse decode kernel: typed refusals and the shared-memory picture (no GPU, no cutlass)."""

from __future__ import annotations

import pytest

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_config import (
    MAX_SHARED_BYTES,
    SPLIT,
    RefusalReason,
    SharedLayout,
    can_implement,
    sparse_config,
    sparse_for,
)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"tiles": 4}, RefusalReason.SHARED_MEMORY),
        ({"tiles": 3, "buffers": 2}, RefusalReason.SHARED_MEMORY),
        ({"tiles": 0}, RefusalReason.TILES),
        ({"buffers": 3}, RefusalReason.BUFFERS),
        ({"architecture": "sm_80"}, RefusalReason.ARCHITECTURE),
    ],
)
def test_refusals_are_typed(choices, reason):
    refusal = can_implement(sparse_config(Geometry(heads=192, padded_heads=192), 5, **choices))
    assert refusal is not None
    assert refusal.reason is reason


def test_batch_beyond_the_capacity_is_refused():
    refusal = sparse_for(Geometry(capacity=4), 5)
    assert refusal is not None
    assert refusal.reason is RefusalReason.BATCH
    assert "capacity 4" in str(refusal)


@pytest.mark.parametrize("heads", [64, 96, 128])
@pytest.mark.parametrize("push", [True, False])
def test_default_layouts_run(heads, push):
    for batch in (1, 5, 40):
        assert sparse_for(Geometry(heads=heads, padded_heads=128), batch, push) is None


@pytest.mark.parametrize(("tiles", "buffers"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_shared_regions_do_not_overlap(tiles, buffers):
    layout = SharedLayout(tiles, buffers)
    starts = [
        layout.inbox_barrier,
        layout.statistics,
        layout.rescale,
        layout.probabilities,
        layout.query,
        layout.keys,
        layout.scores,
        layout.inbox,
        layout.nbytes,
    ]
    assert starts == sorted(set(starts))
    assert layout.key_barrier(buffers - 1) + 8 <= layout.abort_flag
    # Own and staged partials lie over dead regions only, and never over the inbox that peers write.
    assert layout.query <= layout.own_partial
    assert layout.staged(SPLIT - 1) <= layout.inbox
    assert layout.nbytes <= MAX_SHARED_BYTES
