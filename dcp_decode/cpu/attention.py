"""Sparse MLA decode of gathered heads over one rank's selected rows, in the kernel's structure (family `seed`).

The keys of a row are dealt to SPLIT virtual CTAs (key j to CTA j % SPLIT), each CTA takes them in chunks of CHUNK
with an online softmax whose P is rounded to E4M3 at 448 of the running max, and the CTAs merge in order in FP32:

    key   0 1 2 3 4 5 6 7 ...          chunk 0 of CTA 0: keys 0 4 8 .. 252; chunk 1: keys 256 ..
    CTA   0 1 2 3 0 1 2 3

Every matrix product has the same shape [heads, 576] x [576, CHUNK] whatever the batch and its counts, so the other
rows of a batch change no bit of a row. Missing keys of the last chunk score -inf and have zero values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_decode import numerics
from dcp_decode.geometry import Geometry

FAMILY = "seed"
SPLIT = 4
CHUNK = 64


@dataclass(frozen=True)
class Partial:
    """One rank's share of a batch: rows FP32 [B, heads, 512] (zeros where count is 0), lse_log2 FP32 [B, heads]."""

    rows: torch.Tensor
    lse_log2: torch.Tensor


def sparse_attention(
    query: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, geometry: Geometry
) -> Partial:
    """Attend to the selected cache rows.

    query: uint8 [B, heads, 576], E4M3. cache: uint8 [N, 576], E4M3. rows: int32 [B, K], a prefix of `valid` (int32
    [B]) flat cache rows. A row of count 0 gets zeros and EMPTY_LSE.
    """
    batch, heads, _ = query.shape
    step = SPLIT * CHUNK
    chunks = max(1, -(-int(valid.max()) // step))
    keys, present = _gather(cache, rows, valid, chunks * step)
    # (B, chunks, CHUNK, SPLIT, 576) -> (chunks, B * SPLIT, CHUNK, 576): key j = (chunk, slot, CTA)
    keys = keys.view(batch, chunks, CHUNK, SPLIT, -1).permute(1, 0, 3, 2, 4)
    keys = keys.reshape(chunks, batch * SPLIT, CHUNK, numerics.ROW_BYTES)
    present = present.view(batch, chunks, CHUNK, SPLIT).permute(1, 0, 3, 2).reshape(chunks, batch * SPLIT, 1, CHUNK)
    queries = numerics.e4m3_values(query).repeat_interleave(SPLIT, dim=0)  # (B * SPLIT, heads, 576)

    running_max = torch.full((batch * SPLIT, heads, 1), -torch.inf)
    total = torch.zeros(batch * SPLIT, heads, 1)
    accumulated = torch.zeros(batch * SPLIT, heads, numerics.LATENT_DIM)
    for chunk_keys, chunk_present in zip(keys, present, strict=True):
        scores = torch.bmm(queries, chunk_keys.transpose(1, 2)) * geometry.scale_log2
        scores = scores.masked_fill_(~chunk_present, -torch.inf)
        new_max = torch.maximum(running_max, scores.amax(dim=2, keepdim=True))
        anchor = _finite_anchor(new_max)
        rescale = torch.exp2(running_max - anchor)
        probabilities = torch.exp2(scores - anchor + numerics.LOG2_E4M3_MAX)
        total = total * rescale + probabilities.sum(dim=2, keepdim=True)
        rounded = numerics.e4m3_values(numerics.e4m3_bytes(probabilities))
        accumulated = accumulated * rescale + torch.bmm(rounded, chunk_keys[:, :, : numerics.LATENT_DIM])
        running_max = new_max
    return _merge_ctas(
        accumulated.view(batch, SPLIT, heads, -1),
        running_max.view(batch, SPLIT, heads, 1),
        total.view(batch, SPLIT, heads, 1),
        geometry.k_scale,
    )


def _gather(
    cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key values FP32 [B, width, 576], zero where absent, and present bool [B, width]."""
    batch = rows.shape[0]
    present = torch.arange(width) < valid[:, None]
    index = torch.zeros(batch, width, dtype=torch.int64)
    copied = min(width, rows.shape[1])
    index[:, :copied] = rows[:, :copied]
    index.masked_fill_(~present, 0)
    encoded = cache.index_select(0, index.view(-1)).view(batch, width, -1)
    # An absent key's bytes may be NaN, and P = 0 times NaN is NaN: they are zeroed, not only masked.
    encoded.masked_fill_(~present[:, :, None], 0)
    return numerics.e4m3_values(encoded), present


def _merge_ctas(accumulated: torch.Tensor, running_max: torch.Tensor, total: torch.Tensor, k_scale: float) -> Partial:
    """Merge the SPLIT partials of a row in CTA order: all inputs [B, SPLIT, heads, ...], FP32."""
    highest = running_max.amax(dim=1)  # (B, heads, 1)
    weights = torch.exp2(running_max - _finite_anchor(highest)[:, None])
    rows = accumulated[:, 0] * weights[:, 0]
    summed = total[:, 0] * weights[:, 0]
    for cta in range(1, SPLIT):
        rows = rows + accumulated[:, cta] * weights[:, cta]
        summed = summed + total[:, cta] * weights[:, cta]
    empty = summed == 0
    divisor = torch.where(empty, 1.0, summed)
    rows = rows * k_scale / divisor
    lse = highest + torch.log2(divisor / numerics.E4M3_MAX)
    lse = torch.where(empty, numerics.EMPTY_LSE, lse)
    return Partial(rows, lse.squeeze(2))


def _finite_anchor(maximum: torch.Tensor) -> torch.Tensor:
    """The max to subtract: 0 where nothing was seen yet (-inf), since -inf minus -inf is NaN; a NaN stays."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def merge_sources(rows: torch.Tensor, lse_log2: torch.Tensor) -> torch.Tensor:
    """Merge D sources by their LSE: BF16 [B, H, 512].

    rows: BF16 [D, B, H, 512], anything finite where the source is empty. lse_log2: FP32 [D, B, H], EMPTY_LSE where the
    source holds none of the row's keys. FP32, in source order; all sources empty: zeros.
    """
    anchor = _finite_anchor(lse_log2.amax(dim=0))
    weights = torch.exp2(lse_log2 - anchor)[..., None]  # (D, B, H, 1)
    weight_sum = torch.zeros_like(weights[0])
    merged = torch.zeros(rows.shape[1:])
    for source_weights, source_rows in zip(weights, rows, strict=True):
        merged = merged + source_weights * source_rows.to(torch.float32)
        weight_sum = weight_sum + source_weights
    return numerics.bf16_rows(merged / torch.where(weight_sum == 0, 1.0, weight_sum))
