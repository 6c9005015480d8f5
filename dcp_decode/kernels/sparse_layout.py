"""Which configuration of the sparse decode a batch runs: from a table of measurements, else by counting waves.

Functions of host data that all ranks agree on (rows, heads, keys that a rank may expect, architecture), never of counts
on the device; so is the family of bits that they choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_decode.geometry import HEAD_TILE, Geometry
from dcp_decode.kernels.sparse_config import EXCHANGES, MAX_TILES, SparseConfig
from dcp_decode.kernels.sparse_refusal import RefusalReason, SparseRefusal
from dcp_decode.kernels.warpgroup_config import CHUNKS, SPLITS, WarpgroupConfig

DecodeConfig = SparseConfig | WarpgroupConfig  # of any kernel that is a sparse decode
Layout = Callable[[Geometry, int, bool], DecodeConfig]  # (geometry, batch, push) -> configuration

# Relative time of a wave of CTAs by tiles: 5.2 / 8.6 / 10 us at 256 keys, 17.5 / 27 / 35 us at 2048 (H200).
WAVE_COST = {1: 1.0, 2: 1.65, 3: 1.95}
# Clusters of 4 CTAs, one CTA a multiprocessor, that run at once on 132 of them: 30 fit, 32 take two waves.
WAVE_CLUSTERS = 30

# (architecture, heads) -> ((most rows, most keys), layout), the first that has room is chosen.
MEASURED: dict[tuple[str, int], tuple[tuple[tuple[int, int], Layout], ...]] = {}
HEAD_ROWS = (8, 16, 24, 32)  # of a CTA, worth timing


def sparse_layout(batch: int, heads: int, keys: int, architecture: str) -> Layout:
    """What a bucket of `batch` rows, `heads` query heads and about `keys` keys of a row on a rank runs.

    Where nothing was measured: the exchange of partials, and the tiles whose waves of clusters cost least. Measured at
    96 heads, 256 keys, tiles 1 / 2 / 3, us: B = 5: 5.2 / 7.7 / 9.7; 6: 9.7 / 8.6 / 9.7; 8: 10.0 / 8.6 / 10.7;
    16: 19.9 / 17.1 / 19.7; 40: 41.5 / 35.1 / 32.2. The bulk exchange was slower everywhere (5.55 against 5.15 us with
    one tile, 8.6 against 7.6 with two).
    """
    for (most_rows, most_keys), layout in MEASURED.get((architecture, heads), ()):
        if batch <= most_rows and keys <= most_keys:
            return layout
    return sparse_config


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
    chosen = _cheapest_tiles(batch, geometry.heads) if tiles is None else tiles
    # Three tiles leave no room for a second key buffer.
    defaults = {"buffers": 2 if chosen <= 2 else 1}
    return SparseConfig(geometry, batch, push, chosen, **(defaults | choices))


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
    warpgroups = [
        WarpgroupConfig(geometry, batch, push, head_rows, split, _fitting_chunk(expected_keys(geometry, keys), split))
        for head_rows in HEAD_ROWS
        for split in SPLITS
    ]
    candidates: list[DecodeConfig] = [*exchanging, *warpgroups]
    allowed = [
        config
        for config in candidates
        if config.refusal() is None and refuse_architecture(config, architecture) is None
    ]
    return list(dict.fromkeys([default, *allowed]))


def _fitting_chunk(keys: int, split: int) -> int:
    """The smallest chunk that a CTA needs once, else the largest."""
    return next((chunk for chunk in CHUNKS if keys <= split * chunk), CHUNKS[-1])


def _cheapest_tiles(batch: int, heads: int) -> int:
    allowed = [tiles for tiles in WAVE_COST if heads % (HEAD_TILE * tiles) == 0]

    def cost(tiles: int) -> float:
        clusters = batch * heads // (HEAD_TILE * tiles)
        return -(-clusters // WAVE_CLUSTERS) * WAVE_COST[tiles]

    return min(allowed, key=cost)
