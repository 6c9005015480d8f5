"""Which configuration a batch runs: sound for every shape, on sm_90a by measured times."""

from __future__ import annotations

import math

import pytest

from dcp_decode.checkpoint import summary
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.chain_config import WAVE_MULTIPROCESSORS, chain_config, fused_for
from dcp_decode.kernels.configs import stage_kernels
from dcp_decode.kernels.sparse_config import SparseConfig
from dcp_decode.kernels.sparse_layout import (
    ANYWHERE,
    MEASURED,
    ONE_LAUNCH_SAVES,
    WAVE_OF_CLUSTERS,
    Wave,
    cheapest_wave,
    decode_config,
    expected_keys,
    refuse_architecture,
    sparse_config,
)
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig

WAVES = {"anywhere": ANYWHERE} | MEASURED
TABLES = [(architecture, wave) for architecture, table in WAVES.items() for wave in table]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("heads", [16, 64, 96, 128, 192])
@pytest.mark.parametrize("keys", [1, 64, 256, 257, 1024, 2048])
def test_every_batch_has_a_layout_that_runs(heads, keys, architecture):
    geometry = Geometry(heads=heads, padded_heads=heads, capacity=64)
    for batch in (1, 2, 5, 6, 11, 16, 23, 40, 64):
        for push in (True, False):
            config = decode_config(geometry, batch, push, architecture, keys)
            assert (config.geometry, config.batch, config.push) == (geometry, batch, push)
            assert config.refusal() is None
            assert refuse_architecture(config, architecture) is None


@pytest.mark.parametrize(("architecture", "wave"), TABLES)
def test_waves_describe_the_clusters_of_their_configuration(architecture, wave):
    geometry = Geometry(heads=wave.heads * 16, padded_heads=wave.heads * 16, capacity=1)
    for keys, us in wave.times:
        config = wave.layout(keys)(geometry, 1, True)
        clusters = [along // of_cluster for along, of_cluster in zip(config.grid, config.cluster, strict=True)]
        assert clusters == [1, 16, 1]
        assert config.cluster[0] * config.cluster[1] == wave.ctas
        assert wave.cost(1, wave.heads, keys) == pytest.approx(us)
        assert architecture == "anywhere" or architecture in config.architectures
    assert list(wave.times) == sorted(wave.times)


def test_cost_counts_waves_between_what_was_measured():
    wave = Wave(lambda keys: sparse_config, 16, 4, ((256, 4.0), (1024, 10.0)))
    full = WAVE_OF_CLUSTERS[4]
    assert [wave.cost(full, 16, keys) for keys in (1, 256, 640, 1024)] == [4.0, 4.0, 7.0, 10.0]
    assert wave.cost(full + 1, 16, 256) == 8.0
    assert wave.cost(1, 16, 1025) == float("inf")


@pytest.mark.parametrize(
    ("batch", "keys", "family", "heads"),
    [
        (1, 256, "probabilities", 16),
        (5, 256, "probabilities", 16),
        (5, 257, "probabilities_128", 16),
        (5, 384, "probabilities_128", 16),
        (5, 513, "warpgroup_4x256", 16),
        (5, 1024, "warpgroup_4x256", 16),
        (5, 2048, "warpgroup_8x256", 32),
        (8, 256, "warpgroup_2x128", 16),
        (8, 301, "warpgroup_2x256", 16),
        (8, 1024, "warpgroup_4x256", 32),
        (16, 256, "warpgroup_1x256", 16),
        (16, 301, "warpgroup_2x256", 24),
        (40, 256, "warpgroup_1x256", 32),
        (40, 301, "warpgroup_1x256", 32),
    ],
)
def test_measured_points_run_what_was_fastest_there(batch, keys, family, heads):
    config = decode_config(Geometry(capacity=batch), batch, True, "sm_90a", keys)
    assert (config.family, config.head_rows) == (family, heads)


@pytest.mark.parametrize("batch", [1, 2, 5, 6, 8, 10, 16, 40])
def test_no_step_is_far_above_the_line(batch):
    """Of what is chosen: nothing between so many keys and twice as many costs more than 1.3 x the line between both."""

    def cost(keys):
        return cheapest_wave(MEASURED["sm_90a"], batch, 96, keys).cost(batch, 96, keys)

    for low in (64, 128, 256, 512, 1024):
        for keys in range(low, 2 * low + 1):
            line = cost(low) + (cost(2 * low) - cost(low)) * (keys - low) / low
            assert cost(keys) <= summary.CLIFF * line, keys


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(("topk", "dcp"), [(256, 8), (2048, 8), (1700, 4), (1024, 4), (1600, 4), (512, 2), (900, 2)])
def test_a_batch_that_fits_one_launch_is_laid_out_for_it(topk, dcp, batch):
    """Up to a round's 512 keys: what the decode alone would gain elsewhere is less than three launches cost."""
    geometry = Geometry(topk=topk, dcp=dcp, capacity=5)
    assert expected_keys(geometry, None) <= 512
    assert fused_for(geometry, batch, "sm_90a", True, WAVE_MULTIPROCESSORS) is None


def test_one_launch_saves_only_where_all_clusters_are_resident():
    wave = Wave(lambda keys: sparse_config, 16, 4, ((256, 4.0),), fuses=True)
    full = WAVE_OF_CLUSTERS[4]
    assert wave.cost_in_chain(full, 16, 256) == 4.0 - ONE_LAUNCH_SAVES
    assert wave.cost_in_chain(full + 1, 16, 256) == wave.cost(full + 1, 16, 256) == 8.0


def test_a_run_serves_most_rows_in_one_round():
    """Its rows have more keys than an even share on many ranks; the kernels are chosen for those."""
    geometry = Geometry(capacity=40)
    for batch in (1, 5, 8, 16, 40):
        config = decode_config(geometry, batch, True, "sm_90a")
        assert config == decode_config(geometry, batch, True, "sm_90a", expected_keys(geometry, None))
        assert config.split * config.chunk >= 301 or config.chunk == 256
    assert decode_config(geometry, 5, True, "sm_90a").family == chain_config(geometry, 5).sparse.family


@pytest.mark.parametrize(("keys", "chunk", "buffers"), [(256, 64, 2), (257, 128, 1), (512, 128, 1), (513, 64, 2)])
def test_a_chain_has_the_chunk_that_needs_one_round(keys, chunk, buffers):
    sparse = chain_config(Geometry(capacity=5), 5, keys).sparse
    assert (sparse.chunk, sparse.buffers) == (chunk, buffers)


def test_other_architectures_run_what_every_one_can():
    """A table of one GPU says nothing of another; and only sm_90a has wgmma."""
    geometry = Geometry(capacity=40)
    decodes = {name: stage_kernels(geometry, 40, True, name)["sparse_decode"] for name in ARCHITECTURES}
    assert isinstance(decodes["sm_90a"], WarpgroupConfig)
    assert isinstance(decodes["sm_100a"], SparseConfig)
    assert decodes["sm_100a"] == decodes["sm_103a"] == sparse_config(geometry, 40)


@pytest.mark.parametrize(
    ("topk", "ranks", "keys"), [(2048, 8, 301), (100, 16, 14), (2048, 1, 2048), (2, 2, 2), (1, 8, 1)]
)
def test_keys_expected_are_an_even_share_and_three_standard_deviations(topk, ranks, keys):
    geometry = Geometry(topk=topk, dcp=ranks)
    assert expected_keys(geometry, None) == keys
    assert expected_keys(geometry, 17) == 17
    deviation = math.sqrt(topk * (ranks - 1)) / ranks
    assert keys == min(topk, math.ceil(topk / ranks + 3 * deviation))
