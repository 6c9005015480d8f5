"""Static choices of the kernels, what they launch with, and which kernels a batch of verify rows needs.

Plain data, shared by compilation, ahead-of-time libraries and launches: a machine that only launches has no cutlass.
(The choices of the sparse decode, and its refusals, are many: `sparse_config`, `warpgroup_config`, `sparse_layout`.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from dcp_decode import numerics
from dcp_decode.errors import ConfigError
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_layout import decode_config

PEERS_A_THREAD = 8
QUERY_PIECE_BYTES = 16
QUERY_ROW_PIECES = numerics.ROW_BYTES // QUERY_PIECE_BYTES
EAGER_BATCH = 8
KEY_WORDS = 2
BLOCK_BYTES = 64  # of SHA-256
SCHEDULE_BYTES = 4 * 64 + 16  # of a block's expanded words; 16 more, so that a warp's stores fall on all banks


class KernelConfig(Protocol):
    """What every configuration tells: a frozen dataclass of what one kernel is specialised for.

    threads: of a CTA. shared_bytes: dynamic shared memory of a CTA.
    """

    @property
    def geometry(self) -> Geometry: ...
    @property
    def batch(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


@dataclass(frozen=True)
class _BatchConfig:
    """The geometry and the batch rows B of the grid. Raises ConfigError when B exceeds the mailbox capacity."""

    geometry: Geometry
    batch: int

    shared_bytes: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= self.geometry.capacity:
            raise ConfigError("batch", self.batch, f"must be in 1 .. mailbox capacity {self.geometry.capacity}")


@dataclass(frozen=True)
class ExchangeConfig(_BatchConfig):
    """Of the top-k push and receive. pdl: programmatic dependent launch."""

    pdl: bool = True

    threads: ClassVar[int] = 128

    @property
    def piece_words(self) -> int:
        """Words that a thread moves at once."""
        return 4 if self.geometry.topk % 2 == 0 else 1

    @property
    def row_pieces(self) -> int:
        return self.geometry.topk * KEY_WORDS // self.piece_words

    @property
    def pieces(self) -> int:
        """Pieces of one rank's list of all rows."""
        return self.batch * self.row_pieces

    @property
    def grid(self) -> tuple[int, int, int]:
        return (-(-self.pieces // self.threads), self.geometry.dcp, 1)


@dataclass(frozen=True)
class QueryConfig(_BatchConfig):
    """Of the query push. pdl: programmatic dependent launch."""

    pdl: bool = True

    threads: ClassVar[int] = 32

    @property
    def pieces(self) -> int:
        """16-byte pieces of the own heads' rows."""
        return self.batch * self.geometry.owner_heads * QUERY_ROW_PIECES

    @property
    def peers_a_thread(self) -> int:
        return min(PEERS_A_THREAD, self.geometry.dcp)

    @property
    def peer_groups(self) -> int:
        return self.geometry.dcp // self.peers_a_thread

    @property
    def grid(self) -> tuple[int, int, int]:
        return (-(-self.pieces // self.threads), self.peer_groups, 1)


@dataclass(frozen=True)
class ValueConfig(_BatchConfig):
    """Of the merge, and of the value push of the local route. push: the route. pdl: programmatic dependent launch."""

    push: bool = True
    pdl: bool = True

    threads: ClassVar[int] = 64

    @property
    def columns_a_thread(self) -> int:
        """Latent columns of a thread: 8, one 16-byte load a source."""
        return numerics.LATENT_DIM // self.threads

    @property
    def eager(self) -> bool:
        """Whether payload words are loaded before it is known which are wanted."""
        return self.batch <= EAGER_BATCH and self.geometry.dcp <= 8 and self.geometry.generations == 2


@dataclass(frozen=True)
class DigestConfig(_BatchConfig):
    """Of the digests of merged rows, a warp each. pdl: programmatic dependent launch."""

    pdl: bool = True

    threads: ClassVar[int] = 32
    shared_bytes: ClassVar[int] = threads * SCHEDULE_BYTES

    @property
    def row_blocks(self) -> int:
        """Blocks of a row's own heads."""
        return self.geometry.owner_heads * 2 * numerics.LATENT_DIM // BLOCK_BYTES

    @property
    def message_bytes(self) -> int:
        """From one (layer, rank)'s rows to the next one's."""
        return self.batch * self.row_blocks * BLOCK_BYTES


def stage_kernels(geometry: Geometry, batch: int, push: bool, architecture: str) -> dict[str, KernelConfig]:
    """Kernel name -> configuration, of every kernel that a verify step of B rows launches on such GPUs.

    push: the route. architecture: one of `sparse_refusal.ARCHITECTURES`.
    """
    kernels: dict[str, KernelConfig] = {
        "topk_push": ExchangeConfig(geometry, batch),
        "topk_receive": ExchangeConfig(geometry, batch),
        "query_push": QueryConfig(geometry, batch),
        "sparse_decode": decode_config(geometry, batch, push, architecture),
        "merge": ValueConfig(geometry, batch, push),
        "digest": DigestConfig(geometry, batch),
    }
    if not push:
        kernels["value_push"] = ValueConfig(geometry, batch, push)
    return kernels
