"""Number formats against integer arithmetic that shares nothing with them; exhaustive over every BF16 input."""

from __future__ import annotations

import bisect
import math
import struct

import pytest
import torch

from dcp_decode import numerics

UNIT_EXPONENT = 133  # 2**-133 is the smallest BF16 subnormal: every BF16 and E4M3 value is an integer in this unit


def e4m3_units(code: int) -> int:
    """Magnitude of a finite E4M3 code 0 .. 0x7E in units of 2**-133."""
    exponent, mantissa = code >> 3, code & 7
    value, power = (mantissa, -9) if exponent == 0 else (8 + mantissa, exponent - 10)
    return value << (power + UNIT_EXPONENT)


# Doubled, so that the midpoint of two neighbours is an integer too.
MIDPOINTS = [e4m3_units(code) + e4m3_units(code + 1) for code in range(0x7E)]


def nearest_e4m3(bf16_bits: int) -> int:
    """E4M3 byte of a BF16 bit pattern: nearest, ties to the even code, saturating, NaN to 0x7F."""
    exponent, mantissa = (bf16_bits >> 7) & 0xFF, bf16_bits & 0x7F
    if exponent == 0xFF and mantissa:
        return 0x7F
    shifted = mantissa if exponent == 0 else (128 + mantissa) << (exponent - 1)
    units = 1 << 400 if exponent == 0xFF else shifted
    below = bisect.bisect_left(MIDPOINTS, 2 * units)  # midpoints strictly below the value
    code = below
    if code < len(MIDPOINTS) and MIDPOINTS[code] == 2 * units and code % 2:
        code += 1
    return code | (0x80 if bf16_bits & 0x8000 else 0)


def every_bf16() -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def floats_of(words: list[int]) -> torch.Tensor:
    return torch.tensor([signed(word) for word in words], dtype=torch.int32).view(torch.float32)


def test_the_table_itself() -> None:
    assert nearest_e4m3(0x3F80) == 0x38  # 1.0
    assert nearest_e4m3(0x43E0) == 0x7E  # 448
    assert e4m3_units(0x7E) == 448 << UNIT_EXPONENT
    assert e4m3_units(1) == 1 << (UNIT_EXPONENT - 9)
    assert sorted(MIDPOINTS) == MIDPOINTS


def test_e4m3_of_every_bf16_value() -> None:
    values = every_bf16()
    expected = torch.tensor([nearest_e4m3(bits & 0xFFFF) for bits in range(-32768, 32768)], dtype=torch.uint8)
    for encoded in (numerics.e4m3_bytes(values.float()), numerics.quantize_e4m3(values, 1.0)):
        different = (encoded != expected).nonzero().flatten().tolist()
        assert not different, [(float(values[i]), int(encoded[i]), int(expected[i])) for i in different[:5]]


def test_no_e4m3_byte_is_the_armed_byte() -> None:
    assert not bool((numerics.e4m3_bytes(every_bf16().float()) == numerics.ARMED_BYTE).any())
    positive, negative = floats_of([0x7FC00000, 0x7F800001]), floats_of([0xFFC00000, 0xFFFFFFFF])
    for nan in (positive, negative):
        assert numerics.e4m3_bytes(nan).tolist() == [numerics.E4M3_NAN] * 2
        assert numerics.quantize_e4m3(nan, 0.1).tolist() == [numerics.E4M3_NAN] * 2


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (448.0, 0x7E),
        (464.0, 0x7E),  # where a conversion without saturation starts to give NaN
        (464.1, 0x7E),
        (3e38, 0x7E),
        (math.inf, 0x7E),
        (-math.inf, 0xFE),
        (17.0, 0x58),  # between 16 and 18: even mantissa below
        (19.0, 0x5A),  # between 18 and 20: even mantissa above
        (2.0**-10, 0x00),  # half of the smallest subnormal: to zero
        (3 * 2.0**-10, 0x02),
        (math.nextafter(17.0, 18.0), 0x58),  # FP32 can't hold it: still the tie
        (17.0 + 2.0**-19, 0x59),
        (0.0, 0x00),
        (-0.0, 0x80),
    ],
)
def test_e4m3_ties_and_saturation(value: float, byte: int) -> None:
    assert numerics.e4m3_bytes(torch.tensor([value], dtype=torch.float32)).tolist() == [byte]


def test_quantizing_multiplies_by_the_rounded_reciprocal() -> None:
    """byte = E4M3(x * (1 / scale)), which differs from E4M3(x / scale) for some x when scale is no power of two."""
    values = every_bf16()
    scale = 0.3
    inverse = numerics.reciprocal(scale)
    product = (values.double() * inverse).float()  # exact in FP64: 8 and 24 bits; one rounding
    assert torch.equal(numerics.quantize_e4m3(values, scale), numerics.e4m3_bytes(product))
    # Values on bytes come back as the bytes at a power of two.
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    exact = numerics.e4m3_values(codes) * 2.0**-4
    assert torch.equal(numerics.quantize_e4m3(exact.bfloat16(), 2.0**-4), codes)


def test_e4m3_values_are_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64):
        values = numerics.e4m3_values(codes, dtype)
        assert values.dtype == dtype
        for code, value in zip(codes.tolist(), values.tolist(), strict=True):
            if code & 0x7F == 0x7F:
                assert math.isnan(value)
                continue
            assert abs(value) == e4m3_units(code & 0x7F) / (1 << UNIT_EXPONENT)
            assert math.copysign(1, value) == (-1 if code & 0x80 else 1)


def test_bf16_of_fp32_at_every_upper_half() -> None:
    lower = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    words = [(upper << 16) | low for upper in range(0x10000) for low in lower]
    rounded = numerics.bf16_rows(floats_of(words)).view(torch.int16).to(torch.int32) & 0xFFFF
    expected = []
    for word in words:
        if (word & 0x7FFFFFFF) > 0x7F800000:
            expected.append(numerics.BF16_NAN)
        else:
            expected.append((word + 0x7FFF + ((word >> 16) & 1)) >> 16 & 0xFFFF)
    different = [i for i, (a, b) in enumerate(zip(rounded.tolist(), expected, strict=True)) if a != b]
    assert not different, [(hex(words[i]), hex(int(rounded[i])), hex(expected[i])) for i in different[:5]]
    assert 0xFFFF not in expected


def test_two_bf16_nans_never_make_an_armed_word() -> None:
    nan = floats_of([0xFFFFFFFF, 0xFFC00000, 0x7FC00000, 0xFF800001])
    words = numerics.bf16_rows(nan).view(torch.int32)
    assert words.tolist() == [(numerics.BF16_NAN << 16) | numerics.BF16_NAN] * 2
    assert numerics.ARMED_WORD not in words.tolist()
    strided = nan.expand(3, 4).t()
    assert (numerics.bf16_rows(strided).contiguous().view(torch.int16) == numerics.BF16_NAN).all()


def test_fp32_nans_become_canonical_and_numbers_stay() -> None:
    words = [0xFFFFFFFF, 0x7F800001, 0xFFC00000, 0x7FC00000, 0xFF800000, 0x7F800000, 0x80000000, 0x3F800000, 1]
    canonical = numerics.canonical_fp32(floats_of(words)).view(torch.int32)
    assert canonical.tolist() == [numerics.FP32_NAN] * 4 + [signed(word) for word in words[4:]]
    assert numerics.ARMED_WORD not in canonical.tolist()


def test_sentinels() -> None:
    assert struct.pack("<i", numerics.ARMED_WORD) == bytes([numerics.ARMED_BYTE] * 4)
    assert struct.pack("<i", numerics.EMPTY_LSE_BITS) == struct.pack("<f", numerics.EMPTY_LSE)
    assert numerics.EMPTY_LSE_BITS != numerics.ARMED_WORD
    assert pytest.approx(448, rel=1e-15) == 2.0**numerics.LOG2_E4M3_MAX
    assert pytest.approx(1, rel=1e-15) == numerics.LN_2 * numerics.LOG2_E
    assert numerics.ROW_BYTES == 576


@pytest.mark.parametrize("scales", [(192**-0.5, 1 / 16, 1 / 16), (0.07, 0.3, 1.7e-3), (1e-6, 1e-12, 1e-12)])
def test_scale_log2_is_rounded_once(scales: tuple[float, float, float]) -> None:
    softmax, q, k = scales
    exact = softmax * q * k * math.log2(math.e)
    value = numerics.scale_log2(softmax, q, k)
    assert value == struct.unpack("<f", struct.pack("<f", exact))[0]
    # At most half an FP32 unit from the FP64 product, and a product rounded in FP32 at every factor is not always that.
    assert abs(value - exact) <= 2.0**-24 * exact


def test_scale_log2_rounded_at_every_factor_would_differ() -> None:
    differing = 0
    for step in range(200):
        scales = (0.05 + step * 1e-3, 0.03, 0.07)
        stepwise = torch.tensor(1.0)
        for factor in (*scales, numerics.LOG2_E):
            stepwise = stepwise * torch.tensor(factor, dtype=torch.float32)
        differing += float(stepwise) != numerics.scale_log2(*scales)
    assert differing > 20


@pytest.mark.parametrize("scale", [1 / 16, 0.3, 3.0, 2.0**-126, 2.0**126, 1e-20])
def test_reciprocal_is_rounded_once(scale: float) -> None:
    value = numerics.reciprocal(scale)
    assert value == struct.unpack("<f", struct.pack("<f", 1 / scale))[0]
    assert value > 0
    assert math.isfinite(value)
