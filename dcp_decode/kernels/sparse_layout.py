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
from dcp_decode.kernels.sparse_config import EXCHANGE_CHUNKS, EXCHANGES, MAX_GROUPS, MAX_TILES, SparseConfig
from dcp_decode.kernels.sparse_refusal import RefusalReason, SparseRefusal
from dcp_decode.kernels.sparse_shared import BLOCK, SPLIT
from dcp_decode.kernels.warpgroup_config import CHUNKS, SPLITS, WarpgroupConfig

DecodeConfig = SparseConfig | WarpgroupConfig  # of any kernel that is a sparse decode
Layout = Callable[[Geometry, int, bool], DecodeConfig]  # (geometry, batch, push) -> configuration

# Clusters that run at once on 132 multiprocessors, a CTA each, by their CTAs (H200, cuOccupancyMaxActiveClusters).
WAVE_OF_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
ONE_LAUNCH_SAVES = 1.5  # us of a chain of three launches, measured at 256 keys of a row on a rank: more saves more
OWN_KEYS = 256  # of a row on a rank, at the latency checkpoint
# Of warpgroups, worth timing: heads of a CTA, head groups of a cluster.
HEAD_ROWS, GROUPS = (8, 16, 24, 32), (1, 2, 3)


@dataclass(frozen=True)
class Wave:
    """What a full wave of a configuration's clusters takes.

    layout: the configuration, for about so many keys. heads, ctas: of a cluster. times: (keys of a row on a rank,
    measured microseconds), ascending. fuses: whether a chain of one launch can be built around it.
    """

    layout: Callable[[int], Layout]
    heads: int
    ctas: int
    times: tuple[tuple[int, float], ...]
    fuses: bool = False

    def cost(self, batch: int, heads: int, keys: int) -> float:
        """Microseconds of all waves, on the lines between what was measured; infinite for more keys than that."""
        us = self.times[0][1]
        if keys > self.times[-1][0]:
            return math.inf
        for (low, low_us), (high, high_us) in pairwise(self.times):
            if low < keys <= high:
                us = low_us + (high_us - low_us) * (keys - low) / (high - low)
        return us * waves(batch * (heads // self.heads), self.ctas)

    def cost_in_chain(self, batch: int, heads: int, keys: int) -> float:
        """The same, less what one launch saves where all clusters are resident, which a chain of one launch needs."""
        one_launch = self.fuses and waves(batch * (heads // self.heads), self.ctas) == 1
        return self.cost(batch, heads, keys) - ONE_LAUNCH_SAVES * one_launch


def waves(clusters: int, ctas: int) -> int:
    """Turns in which so many clusters of so many CTAs run."""
    return -(-clusters // WAVE_OF_CLUSTERS[ctas])


def tiles_wave(tiles: int, *times: tuple[int, float], groups: int = 1, exchange: str = "partials") -> Wave:
    """Of `SparseDcpDecode`, with the chunk that the keys ask for."""

    def layout(keys: int) -> Layout:
        chunk = exchange_chunk(keys, exchange, tiles)
        return partial(sparse_config, tiles=tiles, groups=groups, exchange=exchange, chunk=chunk)

    return Wave(layout, HEAD_TILE * tiles * groups, SPLIT * groups, times, fuses=exchange == "probabilities")


def warpgroup_wave(head_rows: int, split: int, groups: int, *times: tuple[int, float]) -> Wave:
    """Of `SparseWarpgroups`, with the chunk that the keys ask for."""

    def layout(keys: int) -> Layout:
        chunk = fitting_chunk(keys, split)
        return partial(WarpgroupConfig, head_rows=head_rows, split=split, chunk=chunk, groups=groups)

    return Wave(layout, head_rows * groups, split * groups, times)


# For every architecture. Times of an H200, as those below: 96 heads, hot L2, graphs with dependent launch. One key past
# a chunk costs about what half a chunk does, so what was measured at 288 stands at 257.
ANYWHERE = (
    tiles_wave(1, (256, 5.0), (257, 6.4), (512, 6.7), (1024, 10.4), (2048, 17.7)),
    tiles_wave(2, (256, 8.6), (257, 10.5), (512, 10.8), (2048, 27.0)),
    tiles_wave(3, (256, 10.0), (2048, 35.0)),
)
MEASURED: dict[str, tuple[Wave, ...]] = {
    "sm_90a": (
        *ANYWHERE,
        tiles_wave(1, (256, 4.0), (257, 5.1), (384, 5.2), (385, 6.1), (512, 6.1), exchange="probabilities", groups=2),
        tiles_wave(1, (256, 4.3), (257, 5.3), (384, 5.7), (385, 6.7), (512, 6.7), exchange="probabilities"),
        warpgroup_wave(8, 2, 2, (256, 5.1), (257, 5.7), (384, 6.0), (512, 7.0)),
        warpgroup_wave(16, 4, 2, (256, 5.2), (257, 5.75), (384, 5.8), (512, 6.1), (1024, 8.15), (2048, 13.8)),
        warpgroup_wave(32, 8, 1, (256, 8.7), (512, 8.6), (1024, 9.8), (2048, 13.0)),
        warpgroup_wave(24, 4, 2, (256, 7.2), (384, 7.2), (512, 7.5)),
        warpgroup_wave(16, 2, 2, (256, 5.8), (257, 6.55), (384, 7.0), (512, 7.95), (1024, 13.8), (2048, 26.0)),
        warpgroup_wave(32, 4, 1, (256, 8.3), (384, 8.5), (512, 8.85), (1024, 11.8), (2048, 19.0)),
        warpgroup_wave(16, 2, 1, (256, 6.55), (257, 7.45), (384, 8.0), (512, 9.0)),
        warpgroup_wave(16, 1, 2, (256, 7.4), (257, 9.8), (384, 11.3), (512, 13.1), (1024, 24.9), (2048, 47.8)),
        warpgroup_wave(24, 2, 1, (256, 7.7), (257, 8.95), (384, 9.4), (512, 11.1), (1024, 18.0), (2048, 31.8)),
        warpgroup_wave(16, 1, 1, (256, 8.6), (257, 10.5), (384, 12.3), (512, 14.6)),
        warpgroup_wave(32, 1, 1, (256, 11.2), (257, 13.9), (384, 15.6), (512, 18.2), (1024, 32.4), (2048, 60.8)),
    ),
}


def sparse_layout(batch: int, heads: int, keys: int, architecture: str) -> Layout:
    """What a bucket of `batch` rows, `heads` query heads and about `keys` keys of a row on a rank runs.

    The configuration whose waves cost least in a chain: on every route, so that all have the same bits.
    """
    return cheapest_wave(MEASURED.get(architecture, ANYWHERE), batch, heads, keys).layout(keys)


def cheapest_wave(waves: Sequence[Wave], batch: int, heads: int, keys: int) -> Wave:
    fitting = (wave for wave in waves if heads % wave.heads == 0)
    return min(fitting, key=lambda wave: wave.cost_in_chain(batch, heads, keys))


def decode_config(
    geometry: Geometry, batch: int, push: bool, architecture: str, keys: int | None = None
) -> DecodeConfig:
    """The configuration that `sparse_layout` chooses. keys: of a row on a rank (`expected_keys`)."""
    layout = sparse_layout(batch, geometry.heads, expected_keys(geometry, keys), architecture)
    return layout(geometry, batch, push)


def expected_keys(geometry: Geometry, keys: int | None) -> int:
    """Keys of a row that a rank may expect: those given, else an even share of the K and three standard deviations.

    As many as that because each key may fall on any rank: half of the rows have more than their share on a rank.
    """
    if keys is not None:
        return keys
    topk, ranks = geometry.topk, geometry.dcp
    return min(topk, -(-(topk + math.isqrt(9 * topk * (ranks - 1))) // ranks))


def exchange_chunk(keys: int, exchange: str, tiles: int) -> int:
    """Chunk of `SparseDcpDecode` for about so many keys of a row on a rank: the smallest that needs one round.

    Several rounds, and several tiles, want the room for two buffers of small ones.
    """
    chunks = EXCHANGE_CHUNKS.get(exchange, ()) if tiles == 1 else ()
    return next((chunk for chunk in chunks if keys <= SPLIT * chunk), BLOCK)


def sparse_config(
    geometry: Geometry, batch: int, push: bool = True, tiles: int | None = None, **choices: Any
) -> SparseConfig:
    """The tiles whose waves cost least, unless given, and any other choice of `SparseConfig`: for any architecture."""
    if tiles is None:
        tiles = cheapest_wave(ANYWHERE, batch, geometry.heads, OWN_KEYS).heads // HEAD_TILE
    # Three tiles, or two blocks a chunk, leave no room for a second key buffer.
    defaults = {"buffers": 2 if tiles <= 2 and choices.get("chunk", BLOCK) == BLOCK else 1}
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
    one_tile = partial(sparse_config, geometry, batch, push, 1, exchange="probabilities", trigger="end")
    chunks = EXCHANGE_CHUNKS["probabilities"]
    exchanging += [one_tile(groups=groups, chunk=chunk) for groups in (1, MAX_GROUPS) for chunk in chunks]
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
