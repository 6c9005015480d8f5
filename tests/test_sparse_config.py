"""Static choices of the sparse decode kernel: typed refusals and the shared-memory pictures (no GPU, no cutlass)."""

from __future__ import annotations

import pytest

from dcp_decode import oracle
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_config import EXCHANGES, SparseConfig
from dcp_decode.kernels.sparse_layout import decode_config, sparse_config, sparse_for, sparse_variants
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES, RefusalReason
from dcp_decode.kernels.sparse_shared import (
    BLOCK,
    MAX_SHARED_BYTES,
    ROW_PITCH,
    SPLIT,
    PartialsLayout,
    ProbabilitiesLayout,
)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"tiles": 4}, RefusalReason.SHARED_MEMORY),
        ({"tiles": 3, "buffers": 2}, RefusalReason.SHARED_MEMORY),
        ({"tiles": 0}, RefusalReason.TILES),
        ({"buffers": 3}, RefusalReason.BUFFERS),
        ({"trigger": "never"}, RefusalReason.TRIGGER),
        ({"exchange": "probability"}, RefusalReason.EXCHANGE),
        ({"exchange": "probabilities", "bulk": True}, RefusalReason.EXCHANGE),
        ({"exchange": "probabilities", "tiles": 3, "buffers": 2}, RefusalReason.SHARED_MEMORY),
        ({"exchange": "probabilities", "chunk": 96}, RefusalReason.CHUNK),
        ({"exchange": "partials", "chunk": 128}, RefusalReason.CHUNK),
        ({"exchange": "probabilities", "tiles": 1, "chunk": 128, "buffers": 2}, RefusalReason.SHARED_MEMORY),
        ({"exchange": "probabilities", "tiles": 2, "chunk": 128, "buffers": 1}, RefusalReason.SHARED_MEMORY),
        ({"exchange": "partials", "groups": 2}, RefusalReason.GROUPS),
        ({"exchange": "probabilities", "tiles": 2, "groups": 2}, RefusalReason.GROUPS),
        ({"exchange": "probabilities", "tiles": 1, "groups": 4}, RefusalReason.GROUPS),
        ({"exchange": "probabilities", "tiles": 1, "groups": 0}, RefusalReason.GROUPS),
    ],
)
def test_refusals_are_typed(choices, reason):
    refusal = sparse_config(Geometry(heads=192, padded_heads=192), 5, **choices).refusal()
    assert refusal is not None
    assert refusal.reason is reason


def test_batch_beyond_the_capacity_is_refused():
    refusal = sparse_for(Geometry(capacity=4), 5, True, "sm_90a")
    assert refusal is not None
    assert refusal.reason is RefusalReason.BATCH
    assert "capacity 4" in str(refusal)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("heads", [64, 96, 128])
@pytest.mark.parametrize("push", [True, False])
def test_default_layouts_run(heads, push, architecture):
    for batch in (1, 5, 40):
        assert sparse_for(Geometry(heads=heads, padded_heads=128), batch, push, architecture) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_variants_are_unique_and_run(architecture):
    geometry = Geometry(capacity=5)
    variants = sparse_variants(geometry, 5, True, architecture)
    assert variants[0] == decode_config(geometry, 5, True, architecture)
    assert {variant.exchange for variant in variants if isinstance(variant, SparseConfig)} == set(EXCHANGES)
    assert len({variant.name for variant in variants}) == len(variants)
    assert all(variant.refusal() is None for variant in variants)
    assert {variant.family for variant in variants} <= set(oracle.FAMILIES)


@pytest.mark.parametrize(("tiles", "buffers"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_shared_regions_of_partials_do_not_overlap(tiles, buffers):
    layout = PartialsLayout(tiles, buffers)
    starts = [
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
    assert layout.key_barrier(buffers - 1) + 8 <= layout.abort_flag < layout.use_number < layout.statistics
    # Own and staged partials lie over dead regions only, and never over the inbox that peers write.
    assert layout.query <= layout.own_partial
    assert layout.staged(SPLIT - 1) <= layout.inbox
    assert layout.nbytes <= MAX_SHARED_BYTES


@pytest.mark.parametrize(
    ("tiles", "buffers", "blocks"), [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 1), (3, 1, 1)]
)
def test_shared_regions_of_probabilities_do_not_overlap(tiles, buffers, blocks):
    layout = ProbabilitiesLayout(tiles, buffers, blocks)
    starts = [
        layout.statistics,
        layout.maxima,
        layout.probabilities,
        layout.outgoing,
        layout.query,
        layout.values,
        layout.keys,
        layout.scores,
        layout.scores + layout.slabs * layout.slab_bytes,
    ]
    assert starts == sorted(set(starts))
    assert starts[-1] <= layout.kept <= layout.nbytes <= MAX_SHARED_BYTES
    places = [layout.inbox_barrier, *(layout.key_barrier(buffer) for buffer in range(2))]
    for barrier in (layout.value_barrier, layout.probability_barrier, layout.keys_free_barrier):
        places += [barrier(0), barrier(1)]
    places += [layout.values_free_barrier(0), layout.values_free_barrier(1)]
    assert places == [8 * index for index in range(11)]
    assert places[-1] + 8 <= layout.abort_flag
    # What several blocks and buffers repeat ends where the next region begins.
    assert layout.outgoing - layout.probabilities == 2 * blocks * layout.probability_bytes
    assert layout.keys - layout.values >= buffers * blocks * layout.value_bytes
    assert layout.scores - layout.keys >= buffers * blocks * BLOCK * ROW_PITCH
    # The sums of all heads lie over keys and scores, not over what three tiles keep.
    assert layout.outputs + layout.head_rows * layout.output_pitch <= layout.kept
