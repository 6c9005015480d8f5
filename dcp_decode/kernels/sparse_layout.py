"""Which configuration of the sparse decode a batch runs: from measured times of its waves of CTAs.

Functions of host data that all ranks agree on (rows, heads, keys that a rank may expect, architecture), never of counts
on the device; so is the family of bits that they choose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

from dcp_decode.geometry import HEAD_TILE, Geometry
from dcp_decode.kernels.sparse_config import EXCHANGES, MAX_GROUPS, MAX_TILES, SparseConfig
from dcp_decode.kernels.sparse_refusal import RefusalReason, SparseRefusal
from dcp_decode.kernels.sparse_shared import SPLIT
from dcp_decode.kernels.warpgroup_config import CHUNKS, SPLITS, WarpgroupConfig

DecodeConfig = SparseConfig | WarpgroupConfig  # of any kernel that is a sparse decode
Layout = Callable[[Geometry, int, bool], DecodeConfig]  # (geometry, batch, push) -> configuration

# Clusters that run at once on 132 multiprocessors, a CTA each, by their CTAs (H200, cuOccupancyMaxActiveClusters).
WAVE_OF_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
WAVE_CLUSTERS = WAVE_OF_CLUSTERS[SPLIT]
OWN_KEYS = 256  # of a row on a rank, at the latency checkpoint
# Of warpgroups, worth timing: heads of a CTA, head groups of a cluster.
HEAD_ROWS, GROUPS = (8, 16, 24, 32), (1, 2, 3)


@dataclass(frozen=True)
class Wave:
    """What a full wave of a configuration's clusters takes.

    layout: the configuration, for about so many keys. heads, ctas: of a cluster. times: (keys of a row on a rank,
    measured microseconds), ascending.
    """

    layout: Callable[[int], Layout]
    heads: int
    ctas: int
    times: tuple[tuple[int, float], ...]

    def cost(self, batch: int, heads: int, keys: int) -> float:
        """Microseconds of all waves, on the lines between what was measured; infinite for more keys than that."""
        us = self.times[0][1]
        if keys > self.times[-1][0]:
            return math.inf
        for (low, low_us), (high, high_us) in pairwise(self.times):
            if low < keys <= high:
                us = low_us + (high_us - low_us) * (keys - low) / (high - low)
        return us * waves(batch * (heads // self.heads), self.ctas)


def waves(clusters: int, ctas: int) -> int:
    """Turns in which so many clusters of so many CTAs run."""
    return -(-clusters // WAVE_OF_CLUSTERS[ctas])


def tiles_wave(tiles: int, *times: tuple[int, float], groups: int = 1, **choices: Any) -> Wave:
    """Of `SparseDcpDecode`."""

    def layout(keys: int) -> Layout:
        del keys
        return partial(sparse_config, tiles=tiles, groups=groups, **choices)

    return Wave(layout, HEAD_TILE * tiles * groups, SPLIT * groups, times)


def warpgroup_wave(head_rows: int, split: int, groups: int, *times: tuple[int, float]) -> Wave:
    """Of `SparseWarpgroups`, with the chunk that the keys ask for."""

    def layout(keys: int) -> Layout:
        chunk = fitting_chunk(keys, split)
        return partial(WarpgroupConfig, head_rows=head_rows, split=split, chunk=chunk, groups=groups)

    return Wave(layout, head_rows * groups, split * groups, times)


# For every architecture. Times of an H200, as those below: 96 heads, hot L2, graphs with dependent launch.
ANYWHERE = (
    tiles_wave(1, (256, 5.2), (1024, 10.5), (2048, 17.5)),
    tiles_wave(2, (256, 8.6), (2048, 27.0)),
    tiles_wave(3, (256, 10.0), (2048, 35.0)),
)
MEASURED: dict[str, tuple[Wave, ...]] = {
    "sm_90a": (
        *ANYWHERE,
        tiles_wave(1, (256, 4.05), exchange="probabilities", groups=2),
        tiles_wave(1, (256, 4.3), exchange="probabilities"),
        warpgroup_wave(16, 2, 3, (256, 6.05)),
        warpgroup_wave(16, 2, 1, (256, 6.5)),
        warpgroup_wave(16, 1, 3, (256, 7.3)),
        warpgroup_wave(16, 1, 1, (256, 8.1)),
        warpgroup_wave(32, 1, 1, (256, 10.7), (2048, 60.4)),
        warpgroup_wave(16, 4, 2, (256, 5.2), (1024, 8.1), (2048, 13.8)),
        warpgroup_wave(32, 8, 1, (1024, 10.2), (2048, 12.9)),
    ),
}


def sparse_layout(batch: int, heads: int, keys: int, architecture: str) -> Layout:
    """What a bucket of `batch` rows, `heads` query heads and about `keys` keys of a row on a rank runs.

    The configuration whose waves cost least.
    """
    return _cheapest(MEASURED.get(architecture, ANYWHERE), batch, heads, keys).layout(keys)


def _cheapest(waves: Sequence[Wave], batch: int, heads: int, keys: int) -> Wave:
    return min((wave for wave in waves if heads % wave.heads == 0), key=lambda wave: wave.cost(batch, heads, keys))


def decode_config(
    geometry: Geometry, batch: int, push: bool, architecture: str, keys: int | None = None
) -> DecodeConfig:
    """The configuration that `sparse_layout` chooses. keys: of a row on a rank (`expected_keys`)."""
    layout = sparse_layout(batch, geometry.heads, expected_keys(geometry, keys), architecture)
    return layout(geometry, batch, push)


def expected_keys(geometry: Geometry, keys: int | None) -> int:
    """Keys of a row that a rank may expect: those given, else an even share of the K."""
    return -(-geometry.topk // geometry.dcp) if keys is None else keys


def sparse_config(
    geometry: Geometry, batch: int, push: bool = True, tiles: int | None = None, **choices: Any
) -> SparseConfig:
    """The tiles whose waves cost least, unless given, and any other choice of `SparseConfig`: for any architecture."""
    if tiles is None:
        tiles = _cheapest(ANYWHERE, batch, geometry.heads, OWN_KEYS).heads // HEAD_TILE
    # Three tiles leave no room for a second key buffer.
    defaults = {"buffers": 2 if tiles <= 2 else 1}
    return SparseConfig(geometry, batch, push, tiles, **(defaults | choices))


def sparse_for(geometry: Geometry, batch: int, push: bool, architecture: str) -> SparseRefusal | None:
    """None when a batch of `batch` rows runs on that architecture in its default layout, else the typed reason."""
    config = decode_config(geometry, batch, push, architecture)
    return config.refusal() or refuse_architecture(config, architecture)


def refuse_architecture(config: DecodeConfig, architecture: str) -> SparseRefusal | None:
    """None when an architecture has all instructions of the kernel, else the typed reason."""
    if architecture in config.architectures:
        return None
    detail = f"{architecture}, must be {' or '.join(config.architectures)}"
    return SparseRefusal(RefusalReason.ARCHITECTURE, detail)


def sparse_variants(
    geometry: Geometry, batch: int, push: bool, architecture: str, keys: int | None = None
) -> list[DecodeConfig]:
    """Every configuration worth timing for such rows on that architecture, the default one first.

    keys: as in `decode_config`.
    """
    default = decode_config(geometry, batch, push, architecture, keys)
    exchanging = [
        SparseConfig(geometry, batch, push, tiles, bulk, buffers, exchange=exchange)
        for exchange in EXCHANGES
        for tiles in range(1, MAX_TILES + 1)
        for bulk in (False, True)
        for buffers in (2, 1)
    ]
    one_tile = partial(SparseConfig, geometry, batch, push, exchange="probabilities")
    exchanging += [one_tile(groups=groups, trigger="end") for groups in (1, MAX_GROUPS)]
    expected = expected_keys(geometry, keys)
    warpgroups = [
        WarpgroupConfig(geometry, batch, push, head_rows, split, fitting_chunk(expected, split), groups)
        for head_rows, split, groups in product(HEAD_ROWS, SPLITS, GROUPS)
    ]
    candidates: list[DecodeConfig] = [*exchanging, *filter(_worth_timing, warpgroups)]
    allowed = [
        config
        for config in candidates
        if config.refusal() is None and refuse_architecture(config, architecture) is None
    ]
    return list(dict.fromkeys([default, *allowed]))


def _worth_timing(config: WarpgroupConfig) -> bool:
    """Whether its clusters fill a third of a wave and, where wider CTAs exist, at most one."""
    ctas = config.split * config.groups
    clusters = math.prod(config.grid) // ctas
    most = 2 if config.head_rows == HEAD_ROWS[-1] else 1
    return ctas in WAVE_OF_CLUSTERS and 3 * clusters >= WAVE_OF_CLUSTERS[ctas] and waves(clusters, ctas) <= most


def fitting_chunk(keys: int, split: int) -> int:
    """The smallest chunk that a CTA needs once, else the largest."""
    return next((chunk for chunk in CHUNKS if keys <= split * chunk), CHUNKS[-1])
