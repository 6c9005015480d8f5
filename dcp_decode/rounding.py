"""FP64 models of the roundings that the sparse decode makes, and of the error of its FP32 scores.

Independent of `numerics.py` and of conversion instructions: bytes are decoded by a table built from the definition of
E4M3, and values are rounded by exact FP64 arithmetic. Why the score error is what it is: docstring of `oracle.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_decode.numerics import ROW_BYTES

ACCUMULATOR_UNIT = 2.0**-22  # grid of an accumulation relative to its largest operand's power of two


@dataclass(frozen=True)
class Encoded:
    """E4M3 bytes decoded: values FP64, magnitudes FP32 and 1 / lowest set bit FP32 (0 for zeros; NaN reads as 0)."""

    values: torch.Tensor
    magnitudes: torch.Tensor
    inverse_grid: torch.Tensor

    @classmethod
    def read(cls, encoded: torch.Tensor) -> Encoded:
        index = encoded.to(torch.int32).flatten()
        tables = _decoding_tables(encoded.device)
        return cls(*(table.index_select(0, index).view(encoded.shape) for table in tables))


def _decoding_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three tables [256] of `Encoded`, from the definition of E4M3 and not from a conversion instruction."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    # In units of 2**-9, the smallest subnormal: an integer below 2**18.
    units = torch.where(exponent == 0, mantissa, (8 + mantissa) << (exponent - 1).clamp_min(0))
    units = torch.where((code & 0x7F) == 0x7F, 0, units)
    magnitude = units.to(torch.float64) * 2.0**-9
    grid = (units & -units).to(torch.float64) * 2.0**-9
    inverse = torch.where(units == 0, 0.0, 1 / grid)
    signed = torch.where(code >= 128, -magnitude, magnitude)
    return signed.to(device), magnitude.float().to(device), inverse.float().to(device)


def power_of_two(values: torch.Tensor) -> torch.Tensor:
    """Largest power of two <= each value (FP64 >= 0, normal in FP32), 0 for 0."""
    bits = values.to(torch.float32).view(torch.int32) & 0x7F800000
    return bits.view(torch.float32).to(torch.float64)


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Non-negative FP64 values (at most 448) to the nearest E4M3 value, ties to even; FP64."""
    step = (power_of_two(values) * 2.0**-3).clamp_min_(2.0**-9)
    return torch.round(values / step) * step


def bf16_spacing(values: torch.Tensor) -> torch.Tensor:
    return (power_of_two(values.abs()) * 2.0**-7).clamp_min_(2.0**-133)


def round_bf16(values: torch.Tensor) -> torch.Tensor:
    """FP64 values to the nearest BF16 value, ties to even (finite); FP64."""
    spacing = bf16_spacing(values)
    return torch.round(values / spacing) * spacing


def _accumulator_grid(scores: torch.Tensor, absolute_sum: torch.Tensor) -> torch.Tensor:
    """E of `oracle.py`'s docstring; the factor covers rounding in the partial sums and in `absolute_sum`."""
    return power_of_two((absolute_sum.double() + scores.abs()) * (0.5 * (1 + 2.0**-8))) * ACCUMULATOR_UNIT


def loose_score_error(scores: torch.Tensor, queries: Encoded, keys: Encoded) -> torch.Tensor:
    """delta [R, H, L] in raw score units: Cauchy for sum |q k|, Markov for the number of fine terms."""
    key_norm = torch.linalg.vector_norm(keys.magnitudes, dim=-1)
    query_norm = torch.linalg.vector_norm(queries.magnitudes, dim=-1)
    grid = _accumulator_grid(scores, query_norm[..., None] * key_norm[:, None])
    fine = (queries.inverse_grid @ keys.inverse_grid.mT).double() * grid * (1 + 2.0**-10)
    return fine.floor_().clamp_max_(ROW_BYTES) * grid


def count_score_error(
    scores: torch.Tensor, loose: torch.Tensor, wanted: torch.Tensor, queries: Encoded, keys: Encoded
) -> torch.Tensor:
    """`loose` with delta counted exactly where `wanted`."""
    result = loose.clone()
    for index in (wanted & (loose > 0)).nonzero().split(8192):
        row, head, key = index.unbind(1)
        absolute = (queries.magnitudes[row, head] * keys.magnitudes[row, key]).sum(-1)
        grid = _accumulator_grid(scores[row, head, key], absolute)
        fine = queries.inverse_grid[row, head] * keys.inverse_grid[row, key] > (1 / grid)[:, None]
        result[row, head, key] = torch.minimum(loose[row, head, key], fine.sum(-1) * grid)
    return result
