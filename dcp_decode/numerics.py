"""Conversions of tensors between the number formats of `formats`, whose names are here too.

Every conversion selects the canonical NaN itself instead of trusting the conversion instruction: some CPU builds turn a
negative NaN into E4M3 0xFF or BF16 0xFFFF, which are armed words.
"""

from __future__ import annotations

import torch

from dcp_decode.formats import (
    ARMED_BYTE,
    ARMED_WORD,
    BF16_NAN,
    E4M3_MAX,
    E4M3_NAN,
    EMPTY_LSE,
    EMPTY_LSE_BITS,
    FP32_NAN,
    LATENT_DIM,
    LN_2,
    LOG2_E,
    LOG2_E4M3_MAX,
    ROPE_DIM,
    ROW_BYTES,
    reciprocal,
    scale_log2,
)

__all__ = [
    "ARMED_BYTE",
    "ARMED_WORD",
    "BF16_NAN",
    "E4M3_MAX",
    "E4M3_NAN",
    "EMPTY_LSE",
    "EMPTY_LSE_BITS",
    "FP32_NAN",
    "LATENT_DIM",
    "LN_2",
    "LOG2_E",
    "LOG2_E4M3_MAX",
    "ROPE_DIM",
    "ROW_BYTES",
    "bf16_rows",
    "canonical_bf16",
    "canonical_fp32",
    "e4m3_bytes",
    "e4m3_values",
    "quantize_e4m3",
    "reciprocal",
    "scale_log2",
]


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
