"""The one validated description of a run: heads, ranks, rows and formats, and every size derived from them.

Pure data and integers: no torch, no I/O. The keys named in errors are those of the TOML config (`config.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dcp_decode import formats
from dcp_decode.errors import ConfigError

HEAD_TILE = 16  # heads of one tensor-core tile
PAGE_TOKENS = 64
MAX_TOPK = 2048
MAX_CONTEXT = 1_048_576
DCP_SIZES = (1, 2, 4, 8, 16)
GENERATIONS = (2, 3)
KIMI_SOFTMAX_SCALE = 192**-0.5


@dataclass(frozen=True)
class Geometry:
    """Shapes and scales that all ranks must agree on.

    heads: gathered query heads; each rank owns `owner_heads` = heads / dcp of them.
    dcp: number of ranks D. interleave: consecutive positions a rank stores before the next rank's turn.
    capacity: mailbox rows (the largest batch B). padded_heads: head rows of a query mailbox row.
    topk: width K of the exact global selection. page_stride_rows: flat cache rows from one page to the next.
    softmax_scale, q_scale, k_scale: positive, finite; value = byte * scale.
    generations: copies of every mailbox that successive uses rotate over.
    """

    heads: int = 96
    dcp: int = 8
    interleave: int = 1
    capacity: int = 40
    padded_heads: int = 96
    topk: int = MAX_TOPK
    page_stride_rows: int = PAGE_TOKENS
    softmax_scale: float = KIMI_SOFTMAX_SCALE
    q_scale: float = 1 / 16
    k_scale: float = 1 / 16
    generations: int = 2

    def __post_init__(self) -> None:
        _require_one_of("parallel.dcp", self.dcp, DCP_SIZES)
        _require_one_of("mailbox.generations", self.generations, GENERATIONS)
        _require_range("model.heads", self.heads, HEAD_TILE, 1024)
        if self.heads % HEAD_TILE or self.heads % self.dcp:
            raise ConfigError(
                "model.heads",
                self.heads,
                f"must be a multiple of {HEAD_TILE} and of parallel.dcp = {self.dcp}",
            )
        _require_range("mailbox.padded_heads", self.padded_heads, self.heads, 2048)
        _require_range("mailbox.capacity", self.capacity, 1, 4096)
        _require_range("model.topk", self.topk, 1, MAX_TOPK)
        _require_range("parallel.interleave", self.interleave, 1, MAX_CONTEXT)
        _require_range("cache.page_stride_rows", self.page_stride_rows, PAGE_TOKENS, 1 << 20)
        _require_positive("model.softmax_scale", self.softmax_scale)
        _require_positive("cache.q_scale", self.q_scale)
        _require_positive("cache.k_scale", self.k_scale)
        self._refuse_overflow()

    def _refuse_overflow(self) -> None:
        # The largest score, all bytes saturated: its product with scale_log2 must stay finite in FP32.
        largest = formats.ROW_BYTES * formats.E4M3_MAX**2
        limit = float.fromhex("0x1.fffffep127") / largest
        exact = self.softmax_scale * self.q_scale * self.k_scale * formats.LOG2_E
        smallest_normal = 2.0**-126
        if not smallest_normal <= exact <= limit:
            raise ConfigError(
                "model.softmax_scale * cache.q_scale * cache.k_scale",
                self.softmax_scale * self.q_scale * self.k_scale,
                f"times log2(e) must lie in {smallest_normal:.3g} .. {limit:.3g}, so that a score of 576 saturated "
                "products stays finite in FP32",
            )
        # 448 * scale must stay finite in BF16 (at most 2**127), and 1 / scale a normal FP32 number.
        for key, scale in (("cache.q_scale", self.q_scale), ("cache.k_scale", self.k_scale)):
            if not 2.0**-118 <= scale <= 2.0**118:
                raise ConfigError(key, scale, "must be in 2**-118 .. 2**118, so that 448 * scale stays finite in BF16")

    @property
    def owner_heads(self) -> int:
        """H: query heads that one rank owns."""
        return self.heads // self.dcp

    @cached_property
    def scale_log2(self) -> float:
        """Factor from a raw byte-value dot product to a base-2 logit, an exact FP32 value."""
        return formats.scale_log2(self.softmax_scale, self.q_scale, self.k_scale)

    def owner_of_head(self, head: int) -> int:
        """Rank that owns a gathered query head; a 16-head tile may span several owners."""
        return head // self.owner_heads


def _require_one_of(key: str, value: int, allowed: tuple[int, ...]) -> None:
    if value not in allowed:
        raise ConfigError(key, value, f"must be one of {', '.join(map(str, allowed))}")


def _require_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(key, value, f"must be in {low} .. {high}")


def _require_positive(key: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(key, value, "must be finite and greater than 0")
