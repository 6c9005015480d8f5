"""Static choices of the fused chain, what it shares out over its CTAs, and typed reasons for refusing it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.configs import QUERY_ROW_PIECES, KernelConfig, stage_kernels
from dcp_decode.kernels.refusal import Refusal, Refused
from dcp_decode.kernels.sparse_config import MAX_GROUPS, SparseConfig
from dcp_decode.kernels.sparse_layout import decode_config, exchange_chunk, expected_keys, sparse_config, waves
from dcp_decode.kernels.sparse_shared import SPLIT

MAX_SOURCES = 8  # whose words a query thread has room for
WAVE_MULTIPROCESSORS = 132  # on which the waves of `sparse_layout` were measured; how many fit is the GPU's own matter


class ChainRefusalReason(enum.Enum):
    """Why `DcpChain` can't run a configuration; the value is the sentence that a user reads."""

    SPARSE = "its sparse decode is refused"
    ROUTE = "only the push route can be fused"
    TILES = "the CTAs of its sparse decode must have one head tile"
    FAMILY = "the stages would give other bits"
    SOURCES = f"at most {MAX_SOURCES} ranks can be merged beside the attention"
    WAVE = "all clusters must be resident at once"
    MULTIPROCESSORS = f"all CTAs must be resident at once, which takes {WAVE_MULTIPROCESSORS} multiprocessors"
    SHARED_DEVICE = "ranks that share a device must launch stage by stage"


class ChainRefusal(Refusal):
    """Of a fused chain; `reason` is a ChainRefusalReason."""

    kernel = "fused chain"


class ChainRefused(Refused):
    """`compile_chain` was asked for a configuration that the kernel refuses."""


@dataclass(frozen=True)
class ChainConfig:
    """Everything the kernel is specialised for: the choices of its sparse decode."""

    sparse: SparseConfig

    @property
    def geometry(self) -> Geometry:
        return self.sparse.geometry

    @property
    def batch(self) -> int:
        return self.sparse.batch

    @property
    def threads(self) -> int:
        return self.sparse.threads

    @property
    def shared_bytes(self) -> int:
        return self.sparse.shared_bytes

    @property
    def name(self) -> str:
        """Of the variant, for tables and file names."""
        return self.sparse.name.replace("sparse_", "chain_", 1)

    @property
    def clusters_a_row(self) -> int:
        return self.geometry.heads // self.sparse.head_rows

    @property
    def clusters(self) -> int:
        return self.batch * self.clusters_a_row

    @property
    def ctas_a_row(self) -> int:
        return self.clusters_a_row * SPLIT

    @property
    def pieces(self) -> int:
        """16-byte pieces of the own heads' query."""
        return self.batch * self.geometry.owner_heads * QUERY_ROW_PIECES

    @property
    def pieces_a_cta(self) -> int:
        """Pieces that a CTA pushes: those of its own row."""
        return -(-self.pieces // (self.batch * self.ctas_a_row))

    @property
    def push_turns(self) -> int:
        """Turns in which a query warp pushes them, a lane a piece."""
        return -(-self.pieces_a_cta // 32)

    @property
    def peers_a_warp(self) -> int:
        """Ranks that a query warp pushes to."""
        return -(-self.geometry.dcp // self.sparse.query_warps)


def can_implement(config: ChainConfig) -> ChainRefusal | None:
    """None when the kernel can run this configuration, else why not."""
    refusal = config.sparse.refusal()
    if refusal is not None:
        return ChainRefusal(ChainRefusalReason.SPARSE, str(refusal))
    if not config.sparse.push:
        return ChainRefusal(ChainRefusalReason.ROUTE, "route local")
    if config.sparse.tiles != 1:
        return ChainRefusal(ChainRefusalReason.TILES, f"tiles {config.sparse.tiles}")
    if config.geometry.dcp > MAX_SOURCES:
        return ChainRefusal(ChainRefusalReason.SOURCES, f"ranks {config.geometry.dcp}")
    size = SPLIT * config.sparse.groups
    clusters = config.batch * config.ctas_a_row // size
    if waves(clusters, size) > 1:
        return ChainRefusal(ChainRefusalReason.WAVE, f"batch {config.batch}: {clusters} clusters of {size} CTAs")
    return None


def chain_config(geometry: Geometry, batch: int, keys: int | None = None, **choices: Any) -> ChainConfig:
    """The chain around the fastest sparse decode of one tile, with any of its choices given instead.

    keys: of a row on a rank, as in `sparse_layout.decode_config`.
    """
    given: dict[str, Any] = {"tiles": 1, "exchange": "probabilities"} | choices
    chunk = exchange_chunk(expected_keys(geometry, keys), given["exchange"], given["tiles"])
    sparse = sparse_config(geometry, batch, True, **({"chunk": chunk} | given))
    shared = replace(sparse, groups=MAX_GROUPS)
    return ChainConfig(sparse if "groups" in choices or shared.refusal() else shared)


def chain_for(geometry: Geometry, batch: int, own_device: bool, multiprocessors: int) -> ChainRefusal | None:
    """None when a batch of B rows runs as one launch, else the typed reason.

    own_device: whether no two ranks of one process launch on the same device. multiprocessors: of the smallest device.
    A function of host data that all ranks agree on: they fuse a batch together or not at all.
    """
    if not own_device:
        return ChainRefusal(ChainRefusalReason.SHARED_DEVICE, f"ranks {geometry.dcp}")
    if multiprocessors < WAVE_MULTIPROCESSORS:
        return ChainRefusal(ChainRefusalReason.MULTIPROCESSORS, f"the GPU has {multiprocessors}")
    return can_implement(chain_config(geometry, batch))


def fused_for(
    geometry: Geometry, batch: int, architecture: str, own_device: bool, multiprocessors: int
) -> ChainRefusal | None:
    """As `chain_for`, for a run: its bits must also be those of the stages, whose decode the layout chooses."""
    refusal = chain_for(geometry, batch, own_device, multiprocessors)
    family = decode_config(geometry, batch, True, architecture).family
    if refusal is None and family != chain_config(geometry, batch).sparse.family:
        return ChainRefusal(ChainRefusalReason.FAMILY, f"family {family}")
    return refusal


def step_kernels(geometry: Geometry, batch: int, push: bool, architecture: str) -> dict[str, KernelConfig]:
    """`configs.stage_kernels`, and the chain where one may take their place: what a build holds for a batch."""
    kernels = stage_kernels(geometry, batch, push, architecture)
    if push and fused_for(geometry, batch, architecture, True, WAVE_MULTIPROCESSORS) is None:
        kernels["chain"] = chain_config(geometry, batch)
    return kernels
