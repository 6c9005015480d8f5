"""The data of a measured point: random keys, rows and queries, alike for our kernels and for every peer.

Keys are normal values in E4M3 with one scale; queries are E4M3 too, as the mailbox carries them. Peers get the very
same values in the formats that they read (exact where the scales are powers of two, since E4M3 is a subset of BF16), so
one FP64 oracle judges everybody.
"""

from __future__ import annotations

from functools import cached_property

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.points import L2State, Shape
from dcp_decode.geometry import PAGE_TOKENS, Geometry

PART_ROWS = 131_072
EVICT_BYTES = 1 << 28  # several times the L2 of an H200 (60 MB)
BLOCK_SCALES = 4  # FP32 scales of 128 latent values each in a 656-byte row


class KeyCaches:
    """One flat cache of `parts` x `part_rows` rows on a device, in every format that somebody reads.

    A layer that must find its keys evicted reads its own part.
    """

    def __init__(
        self, parts: int, scale: float, seed: int, part_rows: int = PART_ROWS, device: torch.device | str = "cuda"
    ) -> None:
        self.parts, self.part_rows, self.scale = parts, part_rows, scale
        self.device = torch.device(device)
        self._generator = torch.Generator(device=self.device).manual_seed(seed)

    @cached_property
    def e4m3(self) -> torch.Tensor:
        """uint8 [parts * part_rows, 576]: the flat cache of contract section 3."""
        rows = torch.empty(self.parts * self.part_rows, numerics.ROW_BYTES, dtype=torch.uint8, device=self.device)
        for part in rows.split(self.part_rows):
            values = torch.randn(part.shape, generator=self._generator, device=self.device)
            part.copy_(numerics.quantize_e4m3(values, self.scale))
        return rows

    @cached_property
    def bf16(self) -> torch.Tensor:
        """BF16 [parts * part_rows, 576]: the same values, scale applied."""
        rows = torch.empty(self.e4m3.shape, dtype=torch.bfloat16, device=self.device)
        for own, source in zip(rows.split(self.part_rows), self.e4m3.split(self.part_rows), strict=True):
            own.copy_(numerics.e4m3_values(source) * self.scale)
        return rows

    @cached_property
    def block_scaled(self) -> torch.Tensor:
        """uint8 [pages, 64, 1, 656]: 512 E4M3 values, 4 FP32 scales, 64 BF16 values; the same numbers."""
        latent = numerics.LATENT_DIM
        width = latent + 4 * BLOCK_SCALES + 2 * numerics.ROPE_DIM
        rows = torch.empty(len(self.e4m3), width, dtype=torch.uint8, device=self.device)
        rows[:, :latent] = self.e4m3[:, :latent]
        scales = torch.full((1, BLOCK_SCALES), self.scale, device=self.device)
        rows[:, latent : latent + 4 * BLOCK_SCALES] = scales.view(torch.uint8)
        for own, source in zip(rows.split(self.part_rows), self.e4m3.split(self.part_rows), strict=True):
            rope = (numerics.e4m3_values(source[:, latent:]) * self.scale).to(torch.bfloat16)
            own[:, latent + 4 * BLOCK_SCALES :] = rope.view(torch.uint8)
        return rows.view(-1, PAGE_TOKENS, 1, width)


class L2Eviction:
    """Replaces what L2 holds by random bytes."""

    def __init__(self, device: torch.device | str = "cuda", nbytes: int = EVICT_BYTES) -> None:
        self._words = torch.randint(-(1 << 62), 1 << 62, (nbytes // 8,), device=device)

    def enqueue(self) -> None:
        """Read and write all the bytes on the current stream."""
        self._words.bitwise_not_()


class Problem:
    """What the kernels of one point read.

    rows: int32 [copies, ranks, B, K], flat rows of a layer's (copy = layer % copies) and a measuring rank's keys, a
    prefix of `keys` rows, then -1. valid: int32 [B]. query: BF16 [B, heads, 576], exactly representable in E4M3;
    query_bytes: the same as the mailbox carries it.
    seed: of the query, which all ranks share. own_seed: of the rows, which differ by process.
    """

    def __init__(
        self,
        geometry: Geometry,
        shape: Shape,
        l2: L2State,
        ranks: int,
        layers: int,
        caches: KeyCaches,
        seed: int,
        own_seed: int = 0,
    ) -> None:
        self.geometry, self.shape, self.l2, self.layers, self.caches = geometry, shape, l2, layers, caches
        device, part_rows = caches.device, caches.part_rows
        generator = torch.Generator(device=device).manual_seed(seed + 1 + own_seed)
        copies = layers if l2 == "cold" else 1
        picks = [
            torch.randperm(part_rows, generator=generator, device=device)[: shape.keys].sort().values
            for _ in range(copies * ranks * shape.batch)
        ]
        self.rows = torch.full((copies, ranks, shape.batch, geometry.topk), -1, dtype=torch.int32, device=device)
        self.rows[..., : shape.keys] = torch.stack(picks).view(copies, ranks, shape.batch, shape.keys).to(torch.int32)
        parts = torch.arange(copies, dtype=torch.int32, device=device) % caches.parts
        self.rows[..., : shape.keys] += parts[:, None, None, None] * part_rows
        self.valid = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device)
        generator.manual_seed(seed)
        values = torch.randn((shape.batch, geometry.heads, numerics.ROW_BYTES), generator=generator, device=device)
        self.query_bytes = numerics.quantize_e4m3(values, geometry.q_scale)
        self.query = (numerics.e4m3_values(self.query_bytes) * geometry.q_scale).to(torch.bfloat16)

    def rows_of(self, layer: int, rank_index: int = 0) -> torch.Tensor:
        """int32 [B, K] of a layer and of the measuring rank number `rank_index`."""
        return self.rows[layer % len(self.rows), rank_index]

    @cached_property
    def indices(self) -> torch.Tensor:
        """int32 [copies, B, keys] for peers: rows of the first measuring rank, counted from the copy's own part."""
        return self.rows[:, 0, :, : self.shape.keys] % self.caches.part_rows

    def indices_of(self, layer: int) -> torch.Tensor:
        """int32 [B, keys] of a layer, to be used with `part_of`."""
        return self.indices[layer % len(self.indices)]

    def part_of(self, cache: torch.Tensor, layer: int) -> torch.Tensor:
        """The part of a cache (in any format, rows or pages first) that a layer reads."""
        length = len(cache) // self.caches.parts
        first = layer % len(self.rows) % self.caches.parts * length
        return cache[first : first + length]
