"""Constants of the number formats on the wire, each once and with its reason, and the FP32 scale factors.

Bytes are E4M3 (1 sign, 4 exponent, 3 mantissa bits; largest finite 448; no infinity; NaN 0x7F and 0xFF). A mailbox is
*armed* with 0xFF bytes, so no writer may ever store a 32-bit word of all ones. No torch here: a bad config is refused
without waiting for its import. Conversions of tensors are in `numerics`, which has these names too.
"""

from __future__ import annotations

import math
import struct

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
    return _fp32(softmax_scale * q_scale * k_scale * LOG2_E)


def reciprocal(scale: float) -> float:
    """1 / scale rounded once to FP32: the factor that every quantizing writer multiplies by."""
    return _fp32(1.0 / scale)


def _fp32(value: float) -> float:
    """Nearest FP32 value, ties to even; OverflowError beyond its range, which `Geometry` refuses before."""
    return struct.unpack("<f", struct.pack("<f", value))[0]
