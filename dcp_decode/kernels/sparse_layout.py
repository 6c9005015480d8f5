"""Which configuration of the sparse decode a batch runs: from measured times of its waves of CTAs.

Functions of host data that all ranks agree on (rows, heads, keys that a rank may expect, architecture), never of counts
on the device; so is the family of bits that they choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dcp_decode.geometry import HEAD_TILE, Geometry
from dcp_decode.kernels.sparse_config import EXCHANGES, MAX_TILES, SparseConfig
from dcp_decode.kernels.sparse_refusal import RefusalReason, SparseRefusal
from dcp_decode.kernels.sparse_shared import SPLIT
from dcp_decode.kernels.warpgroup_config import CHUNKS, SPLITS, WarpgroupConfig

DecodeConfig = SparseConfig | WarpgroupConfig  # of any kernel that is a sparse decode
Layout = Callable[[Geometry, int, bool], DecodeConfig]  # (geometry, batch, push) -> configuration

# CTAs that run at once on 132 multiprocessors, one each, by the CTAs of a cluster.
WAVE_CTAS = {1: 132, 2: 132, 4: 120, 8: 120}
WAVE_CLUSTERS = WAVE_CTAS[SPLIT] // SPLIT
FEW_KEYS, MANY_KEYS = 256, 2048  # of a row on a rank, for which times are given
HEAD_ROWS = (8, 16, 24, 32)  # of a warpgroup CTA, worth timing
WORTH_TIMING = range(WAVE_CTAS[1] // 6, 2 * WAVE_CTAS[1] + 1)  # CTAs of a warpgroup grid


@dataclass(frozen=True)
class Wave:
    """What a full wave of a configuration's CTAs takes.

    layout: the configuration, for about so many keys. heads: of a CTA. split: CTAs that share a row's keys.
    few_us, many_us: microseconds at FEW_KEYS and at MANY_KEYS keys of a row.
    """

    layout: Callable[[int], Layout]
    heads: int
    split: int
    few_us: float
    many_us: float

    def cost(self, batch: int, heads: int, keys: int) -> float:
        """Microseconds of all waves, by the line through the two measured times."""
        ctas = batch * (heads // self.heads) * self.split
        share = max(keys - FEW_KEYS, 0) / (MANY_KEYS - FEW_KEYS)
        return -(-ctas // WAVE_CTAS[self.split]) * (self.few_us + (self.many_us - self.few_us) * share)


def tiles_wave(tiles: int, few_us: float, many_us: float, **choices: Any) -> Wave:
    """Of `SparseDcpDecode`."""
    return Wave(lambda keys: partial(sparse_config, tiles=tiles, **choices), HEAD_TILE * tiles, SPLIT, few_us, many_us)


def warpgroup_wave(head_rows: int, split: int, few_us: float, many_us: float, **choices: Any) -> Wave:
    """Of `SparseWarpgroups`, with the chunk that the keys ask for."""

    def layout(keys: int) -> Layout:
        return partial(WarpgroupConfig, head_rows=head_rows, split=split, chunk=fitting_chunk(keys, split), **choices)

    return Wave(layout, head_rows, split, few_us, many_us)


# For every architecture, measured on an H200.
ANYWHERE = (tiles_wave(1, 5.2, 17.5), tiles_wave(2, 8.6, 27.0), tiles_wave(3, 10.0, 35.0))
MEASURED: dict[str, tuple[Wave, ...]] = {}


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
        tiles = _cheapest(ANYWHERE, batch, geometry.heads, FEW_KEYS).heads // HEAD_TILE
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
    expected = expected_keys(geometry, keys)
    warpgroups = [
        WarpgroupConfig(geometry, batch, push, head_rows, split, fitting_chunk(expected, split))
        for head_rows in HEAD_ROWS
        for split in SPLITS
        if geometry.heads % head_rows == 0 and batch * (geometry.heads // head_rows) * split in WORTH_TIMING
    ]
    candidates: list[DecodeConfig] = [*exchanging, *warpgroups]
    allowed = [
        config
        for config in candidates
        if config.refusal() is None and refuse_architecture(config, architecture) is None
    ]
    return list(dict.fromkeys([default, *allowed]))


def fitting_chunk(keys: int, split: int) -> int:
    """The smallest chunk that a CTA needs once, else the largest."""
    return next((chunk for chunk in CHUNKS if keys <= split * chunk), CHUNKS[-1])
