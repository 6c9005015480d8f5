"""Number formats and sentinels of the harness: each constant once, with the reason for its value.

Bytes on the wire are E4M3 (1 sign, 4 exponent, 3 mantissa bits; largest finite 448; no infinity; NaN 0x7F and 0xFF).
A mailbox is *armed* with 0xFF bytes, so no writer may ever store a 32-bit word of all ones: every conversion here
selects the canonical NaN itself instead of trusting the conversion instruction (some CPU builds turn a negative NaN
into E4M3 0xFF or BF16 0xFFFF, which are armed words).
"""

from __future__ import annotations

import math

import torch

# The armed word: four 0xFF bytes, which no canonical (positive) NaN of any format can form.
ARMED_BYTE = 0xFF
ARMED_WORD = -1

# Largest finite E4M3 magnitude: P is scaled to it so that the largest probability of a chunk uses the whole format.
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
BF16_NAN = 0x7FFF
FP32_NAN = 0x7FC00000

# A source that owns none of a row's keys pushes only this LSE; its payload is never read.
EMPTY_LSE = -math.inf
EMPTY_LSE_BITS = -0x00800000  # 0xFF800000 as a signed 32-bit word

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LOG2_E4M3_MAX = math.log2(E4M3_MAX)

LATENT_DIM = 512
ROPE_DIM = 64
ROW_BYTES = LATENT_DIM + ROPE_DIM


def scale_log2(softmax_scale: float, q_scale: float, k_scale: float) -> float:
    """softmax_scale * q_scale * k_scale * log2(e): formed in FP64, rounded once to FP32 (value returned exactly)."""
    exact = softmax_scale * q_scale * k_scale * LOG2_E
    return float(torch.tensor(exact, dtype=torch.float64).to(torch.float32))


def reciprocal(scale: float) -> float:
    """1 / scale rounded once to FP32: the factor that every quantizing writer multiplies by."""
    return float(torch.tensor(1.0 / scale, dtype=torch.float64).to(torch.float32))


def quantize_e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """E4M3 bytes (uint8, same shape) of values / scale: round to nearest even, saturating at +-448, NaN to 0x7F.

    The clamp comes first because torch 2.11 turns overflow into NaN where 2.13 saturates.
    """
    scaled = values.to(torch.float32) * reciprocal(scale)
    return e4m3_bytes(scaled)


def e4m3_bytes(values: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes (uint8, same shape) of FP32 values: nearest even, saturating, NaN to 0x7F."""
    rounded = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return rounded.masked_fill_(torch.isnan(values), E4M3_NAN)


def e4m3_values(encoded: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values (same shape, `dtype`) of E4M3 bytes (uint8); exact in FP32 and FP64."""
    return encoded.view(torch.float8_e4m3fn).to(dtype)


def bf16_rows(values: torch.Tensor) -> torch.Tensor:
    """BF16 (same shape) of FP32 values, nearest even, any NaN as 0x7FFF so that no pair of them is an armed word."""
    rounded = values.to(torch.bfloat16)
    nan = torch.isnan(values)
    return rounded.view(torch.int16).masked_fill_(nan, BF16_NAN).view(torch.bfloat16)


def canonical_bf16(values: torch.Tensor) -> torch.Tensor:
    """BF16 with every NaN replaced by 0x7FFF: rows of any origin that can be pushed."""
    nan = torch.isnan(values)
    return values.contiguous().view(torch.int16).masked_fill(nan, BF16_NAN).view(torch.bfloat16)


def canonical_fp32(values: torch.Tensor) -> torch.Tensor:
    """FP32 with every NaN replaced by 0x7FC00000: an LSE word that can be pushed."""
    nan = torch.isnan(values)
    return values.contiguous().view(torch.int32).masked_fill(nan, FP32_NAN).view(torch.float32)
