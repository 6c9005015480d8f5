"""Static choices of the warpgroup decode: typed refusals, its family and its picture of shared memory (no cutlass)."""

from __future__ import annotations

from itertools import product

import pytest

from dcp_decode import oracle
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_layout import GROUPS, HEAD_ROWS, refuse_architecture, sparse_variants
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES, RefusalReason
from dcp_decode.kernels.sparse_shared import MAX_SHARED_BYTES
from dcp_decode.kernels.warpgroup_config import CHUNKS, MAX_CLUSTER, SPLITS, WarpgroupConfig
from dcp_decode.kernels.warpgroup_shared import QUERY_BLOCKS, SWIZZLE_BYTES

GEOMETRY = Geometry(heads=576, padded_heads=576)
FITTING = [
    WarpgroupConfig(GEOMETRY, 5, True, head_rows, split, chunk, groups)
    for head_rows, split, chunk, groups in product(HEAD_ROWS, SPLITS, CHUNKS, GROUPS)
    if split * groups <= MAX_CLUSTER
]


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"head_rows": 12}, RefusalReason.HEAD_ROWS),
        ({"head_rows": 0}, RefusalReason.HEAD_ROWS),
        ({"head_rows": 96}, RefusalReason.HEAD_ROWS),
        ({"head_rows": 24, "geometry": Geometry(heads=64)}, RefusalReason.HEADS),
        ({"split": 3}, RefusalReason.SPLIT),
        ({"split": 16}, RefusalReason.SPLIT),
        ({"groups": 0}, RefusalReason.GROUPS),
        ({"groups": 5}, RefusalReason.GROUPS),
        ({"split": 4, "groups": 4}, RefusalReason.GROUPS),
        ({"chunk": 192}, RefusalReason.CHUNK),
        ({"chunk": 0}, RefusalReason.CHUNK),
        ({"head_rows": 48}, RefusalReason.HEAD_ROWS),
        ({"trigger": "never"}, RefusalReason.TRIGGER),
        ({"batch": 41}, RefusalReason.BATCH),
        ({"batch": 0}, RefusalReason.BATCH),
    ],
)
def test_refusals_are_typed(choices, reason):
    refusal = WarpgroupConfig(**({"geometry": GEOMETRY, "batch": 5} | choices)).refusal()
    assert refusal is not None
    assert refusal.reason is reason


def test_other_architectures_are_refused_by_name():
    config = WarpgroupConfig(GEOMETRY, 5)
    refusals = {architecture: refuse_architecture(config, architecture) for architecture in ARCHITECTURES}
    assert refusals.pop("sm_90a") is None
    for architecture, refusal in refusals.items():
        assert refusal.reason is RefusalReason.ARCHITECTURE
        assert f"{architecture}, must be sm_90a" in str(refusal)
        others = sparse_variants(GEOMETRY, 5, True, architecture)
        assert not any(isinstance(variant, WarpgroupConfig) for variant in others)
    assert any(isinstance(variant, WarpgroupConfig) for variant in sparse_variants(GEOMETRY, 5, True, "sm_90a"))


def test_families_are_those_of_the_oracle():
    for config in FITTING:
        family = oracle.family_named(config.family)
        assert (family.split, family.chunk, family.assignment) == (config.split, config.chunk, "strided")


@pytest.mark.parametrize("config", FITTING, ids=lambda config: config.name)
def test_shared_regions_do_not_overlap(config):
    layout = config.shared
    assert config.refusal() is None
    barriers = [layout.inbox_barrier, *(layout.key_barrier(tile) for tile in range(layout.tiles))]
    barriers += [layout.inboxes_free_barrier, layout.keys_free_barrier]
    assert barriers == sorted(set(barriers))
    assert barriers[-1] + 8 <= layout.abort_flag < layout.use_number < layout.own_statistics
    starts = [
        layout.own_statistics,
        layout.maxima,
        layout.owners,
        layout.query,
        layout.probabilities,
        layout.keys,
        layout.scores,
        layout.nbytes,
    ]
    sizes = [
        8 * config.head_rows,
        8 * config.head_rows,
        8 * 16,
        2 * 576 * config.head_rows,
        2 * config.chunk * config.head_rows,
        592 * config.chunk,
        4 * (layout.depths - 1) * config.chunk * config.head_rows,
    ]
    for start, size, after in zip(starts[:-1], sizes, starts[1:], strict=True):
        assert start + size <= after
    assert layout.nbytes <= MAX_SHARED_BYTES
    # Operands of wgmma; the last block of the query ends where P begins.
    assert layout.query % SWIZZLE_BYTES == layout.probabilities % SWIZZLE_BYTES == 0
    assert layout.query + QUERY_BLOCKS * layout.block_bytes == layout.probabilities
    # Outputs lie over the query alone. The inbox lies over what the CTA has read, or over nothing.
    assert layout.outputs >= layout.query
    assert layout.outputs + config.head_rows * layout.output_pitch <= layout.probabilities
    assert layout.inbox == (layout.probabilities if layout.inbox_overlays else layout.after_scores)
    assert layout.inbox % 16 == 0
    if config.split > 1:
        assert layout.inbox_bytes == config.head_rows * 2048
        assert layout.statistics == layout.inbox + layout.inbox_bytes
        assert layout.statistics + 8 * config.split * config.head_rows <= layout.nbytes
