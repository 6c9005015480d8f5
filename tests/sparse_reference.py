"""The sparse decode's algorithm in FP32, row by row and CTA by CTA, with switches that break it in one way each.

Shares no code with `dcp_decode.oracle`: it is what the bounds are tested on. Two arithmetics: torch's FP32 products,
and an emulation of tensor cores that align 16 products and the accumulator to the largest exponent and truncate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dcp_decode import numerics
from dcp_decode.geometry import Geometry

LOG2_448 = math.log2(448)


@dataclass(frozen=True)
class Faults:
    """What the reference does wrong; the defaults are correct."""

    rescale: bool = True  # accumulators follow the running max
    anchor: str = "running"  # "row": P anchored at the row's max, "one": not scaled to 448
    split: int = 4
    chunk: int = 64
    total_of_rounded: bool = False  # the sum takes the rounded P
    lse_base: float = 2.0
    truncate_bf16: bool = False
    v_shift: int = 0  # V rows paired with the probability of the key that many places before
    fraction_bits: int = 0  # 0: FP32 products; else the truncating tensor core with that many bits
    skip: int = -1  # key that is left out of its chunk
    order: tuple[int, ...] = ()  # the order in which a score adds the 576 products; correct in any order


def truncating_product(left: torch.Tensor, right: torch.Tensor, start: torch.Tensor, bits: int) -> torch.Tensor:
    """start [M, N] + left [M, K] @ right [K, N] in groups of 16, operands cut to 2**-bits of the largest."""
    total = start.double()
    left, right = left.double(), right.double()
    for first in range(0, left.shape[1], 16):
        terms = left[:, first : first + 16, None] * right[None, first : first + 16]
        terms = torch.cat([terms, total[:, None]], 1)
        exponent = torch.frexp(terms.abs().amax(1, keepdim=True)).exponent - 1
        grid = torch.exp2((exponent - bits).double())
        summed = (terms / grid).trunc().mul(grid).sum(1)
        # The accumulator is FP32, rounded towards zero.
        unit = torch.exp2((torch.frexp(summed).exponent - 24).double())
        total = (summed / unit).trunc() * unit
    return total.float()


def _product(left: torch.Tensor, right: torch.Tensor, start: torch.Tensor, faults: Faults) -> torch.Tensor:
    if faults.fraction_bits:
        return truncating_product(left, right, start, faults.fraction_bits)
    return start + left @ right


def partial(
    query: torch.Tensor, keys: torch.Tensor, geometry: Geometry, faults: Faults
) -> tuple[torch.Tensor, torch.Tensor]:
    """One source's BF16 partial [H, 512] and LSE [H] of bytes query [H, 576] over keys [n >= 1, 576]."""
    q, k = numerics.e4m3_values(query), numerics.e4m3_values(keys)
    if faults.order:
        q, k = q[:, faults.order].contiguous(), k[:, faults.order].contiguous()
    v = numerics.e4m3_values(keys)[:, :512].roll(faults.v_shift, 0)
    heads = q.shape[0]
    row_max = (q @ k.T * geometry.scale_log2).amax(1)
    log2_scale = 0.0 if faults.anchor == "one" else LOG2_448
    ctas = []
    for cta in range(faults.split):
        own = torch.arange(keys.shape[0])[cta :: faults.split]
        running = torch.full((heads,), -math.inf)
        accumulator, total = torch.zeros(heads, 512), torch.zeros(heads)
        for chunk in own.split(faults.chunk) if len(own) else ():
            chunk = chunk[chunk != faults.skip]
            if not len(chunk):
                continue
            scores = _product(q, k[chunk].T, torch.zeros(heads, len(chunk)), faults) * geometry.scale_log2
            new = row_max if faults.anchor == "row" else torch.maximum(running, scores.amax(1))
            rescale = torch.exp2(running - new) if faults.rescale else torch.ones(heads)
            p = torch.exp2(scores - new[:, None] + log2_scale)
            rounded = numerics.e4m3_values(numerics.e4m3_bytes(p))
            accumulator = _product(rounded, v[chunk], accumulator * rescale[:, None], faults)
            total = total * rescale + (rounded if faults.total_of_rounded else p).sum(1)
            running = new
        ctas.append((running, accumulator, total))
    top = torch.stack([running for running, _, _ in ctas]).amax(0)
    weights = [torch.exp2(running - top) for running, _, _ in ctas]
    accumulator = sum(w[:, None] * a for w, (_, a, _) in zip(weights, ctas, strict=True))
    total = sum(w * t for w, (_, _, t) in zip(weights, ctas, strict=True))
    out = accumulator * geometry.k_scale / total[:, None]
    if faults.truncate_bf16:
        out = (out.view(torch.int32) & -0x10000).view(torch.float32)
    return numerics.bf16_rows(out), top + torch.log2(total) - log2_scale


def decode(
    query: torch.Tensor, keys: torch.Tensor, source: torch.Tensor, geometry: Geometry, faults: Faults | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merged BF16 [R, H, 512], partials BF16 [D, R, H, 512] and LSE FP32 [D, R, H], base 2."""
    faults = faults or Faults()
    rows, heads = query.shape[:2]
    parts = torch.zeros(geometry.dcp, rows, heads, 512, dtype=torch.bfloat16)
    lse = torch.full((geometry.dcp, rows, heads), -math.inf)
    for row in range(rows):
        for rank in range(geometry.dcp):
            own = keys[row][source[row] == rank]
            if len(own):
                parts[rank, row], lse[rank, row] = partial(query[row], own, geometry, faults)
    return merge(parts, lse * math.log(2, faults.lse_base)), parts, lse


def merge(parts: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """FP32 merge in source order of BF16 [D, R, H, 512] with base-2 LSE [D, R, H]."""
    top = lse.amax(0)
    weight = torch.exp2(lse - torch.where(top == -math.inf, 0.0, top))[..., None]
    numerator = sum(weight[rank] * parts[rank].float() for rank in range(len(parts)))
    denominator = weight.sum(0)
    return numerics.bf16_rows(torch.where(denominator == 0, 0.0, numerator / denominator))
