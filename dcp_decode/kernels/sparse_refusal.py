"""Typed reasons for refusing a sparse decode, and the checks that all its families share."""

from __future__ import annotations

import enum
from typing import Protocol

from dcp_decode.geometry import MAX_TOPK, Geometry
from dcp_decode.kernels.refusal import Refusal, Refused
from dcp_decode.kernels.sparse_shared import MAX_SHARED_BYTES

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")  # that kernels are compiled for
TRIGGERS = ("start", "merge", "end")


def architecture_name(capability: tuple[int, int]) -> str:
    """sm_90a and the like: compute capability 9 and later have a variant with the features the kernels need."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class RefusalReason(enum.Enum):
    """Why no kernel can run a configuration; the value is the sentence that a user reads."""

    HEADS = "query heads must be a multiple of the heads of a CTA"
    TILES = "tiles must be 1, 2 or 3"
    HEAD_ROWS = "heads of a CTA must be a multiple of 8, at most 32"
    SPLIT = "CTAs of a cluster must be 1, 2, 4 or 8"
    GROUPS = "head groups of a cluster must divide those of a row, and with its CTAs a key be at most 8 CTAs"
    CHUNK = "the kernel has no chunks of so many keys"
    SHARED_MEMORY = "a CTA of this many heads and keys needs more shared memory than the GPU has"
    BATCH = "batch rows must be between 1 and the mailbox capacity"
    WIDTH = f"the top-k width must be between 1 and {MAX_TOPK}"
    BUFFERS = "key buffers must be 1 or 2"
    TRIGGER = "the trigger must be start, merge or end"
    EXCHANGE = "the exchange must be partials or probabilities (never bulk)"
    ARCHITECTURE = "the GPU architecture lacks instructions that this kernel needs"


class SparseRefusal(Refusal):
    """Of a sparse decode; `reason` is a RefusalReason."""

    kernel = "sparse decode"


class SparseRefused(Refused):
    """`compile_sparse` was asked for a configuration that the kernel refuses."""


class _Choices(Protocol):
    @property
    def geometry(self) -> Geometry: ...
    @property
    def batch(self) -> int: ...
    @property
    def trigger(self) -> str: ...
    @property
    def head_rows(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


def refuse_common(config: _Choices) -> SparseRefusal | None:
    """What refuses a configuration of any family, once its own choices are sound."""
    g = config.geometry
    if config.trigger not in TRIGGERS:
        return SparseRefusal(RefusalReason.TRIGGER, config.trigger)
    if g.heads % config.head_rows:
        return SparseRefusal(RefusalReason.HEADS, f"heads {g.heads}, of a CTA {config.head_rows}")
    if not 1 <= config.batch <= g.capacity:
        return SparseRefusal(RefusalReason.BATCH, f"batch {config.batch}, capacity {g.capacity}")
    if not 1 <= g.topk <= MAX_TOPK:
        return SparseRefusal(RefusalReason.WIDTH, f"width {g.topk}")
    if config.shared_bytes > MAX_SHARED_BYTES:
        detail = f"heads {config.head_rows}: {config.shared_bytes} of {MAX_SHARED_BYTES} bytes"
        return SparseRefusal(RefusalReason.SHARED_MEMORY, detail)
    return None
