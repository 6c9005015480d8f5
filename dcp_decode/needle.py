"""The needle test: keys whose values are codes, so that every key must count exactly once and with its own weight.

The error bounds of `oracle.py` are relative to a whole row; among 2048 keys a lost key is 0.05 % of it and can hide.
Here it can't. Key j owns one of 512 columns and one of the digits 8, 9, 11, -28 in it, all other bytes are zero:

    column      0    1    2  ...  511
    keys       8    8    8         8         first 512 keys of a seeded permutation
               9    9    9         9         next 512
              11   11   11        11
             -28  -28  -28       -28         a full column sums to 0

*Count*: with q = 0 every weight is equal, so column value * n / k_scale is the sum of its digits. BF16 rounding of the
partials and of the merged row moves that by at most 2**-8 * (sum |digit| + |sum|) <= 0.33, a lost or doubled key by at
least 8 and any two faults in one column by at least 1. (Digits 1, 4, 16, 64 were dropped: their sum 85 rounds by 0.66.)
The sum does not see in which order keys are read, so a value row paired with another key's probability passes
(`tests/needle_address.py` is a needle that it does not pass).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from dcp_decode.errors import ConfigError, WrongResult
from dcp_decode.geometry import MAX_TOPK, Geometry
from dcp_decode.numerics import LATENT_DIM, LN_2, ROW_BYTES, e4m3_bytes

DIGITS = (8.0, 9.0, 11.0, -28.0)  # 4 significant bits each, distinct magnitudes and pair sums, total 0
BF16_UNIT = 2.0**-8  # unit roundoff
LSE_TOLERANCE = 2.0**-13  # FP32 sum of 512 keys a CTA: 512 * 2**-24 * log2(e) = 4.4e-5; log2 and base: a few 2**-20
STRAY_BYTE = 0x7E  # 448 in every column: what cache rows that no row selects should hold during a needle test


@dataclass(frozen=True)
class Needle:
    """Coded keys: key_bytes uint8 [count, 576], the column int64 [count] and digit FP64 [count] of each key."""

    key_bytes: torch.Tensor
    columns: torch.Tensor
    digits: torch.Tensor
    k_scale: float

    @property
    def count(self) -> int:
        return self.key_bytes.shape[0]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Per-column sums [512] of values [count], one a key."""
        return torch.zeros(LATENT_DIM, dtype=torch.float64).index_add_(0, self.columns, values)


def build_needle(count: int, seed: int, geometry: Geometry) -> Needle:
    """`count` coded keys (1 .. 2048, else ConfigError), in a permutation that `seed` decides."""
    if not 1 <= count <= MAX_TOPK:
        raise ConfigError("needle count", count, f"must be in 1 .. {MAX_TOPK}")
    place = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    columns, level = place % LATENT_DIM, place // LATENT_DIM
    digits = torch.tensor(DIGITS, dtype=torch.float64)[level]
    values = torch.zeros(count, ROW_BYTES, dtype=torch.float64)
    values[torch.arange(count), columns] = digits
    return Needle(e4m3_bytes(values.float()), columns, digits, geometry.k_scale)


def check_needle(needle: Needle, out: torch.Tensor) -> None:
    """Every row of `out` BF16 [..., 512] (q = 0, all keys selected once) counts every key once, or WrongResult.

    `out` is one source's partial or the merged row of any number of sources. The message names the row, and the key
    if one key explains what was seen, else the worst column and its keys.
    """
    expected = needle.sums(needle.digits)
    # FP32 sums and weights: far below 2**-10 of the digits.
    tolerance = (BF16_UNIT + 2.0**-10) * (needle.sums(needle.digits.abs()) + expected.abs())
    seen = out.detach().to("cpu", torch.float64).flatten(0, -2) * (needle.count / needle.k_scale)
    wrong = ~((seen - expected).abs() <= tolerance)
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        raise WrongResult(f"needle row {_place(out, row)}: {_explain(needle, seen[row], expected, tolerance)}")


def check_needle_lse(needle: Needle, lse: torch.Tensor, base: Literal["log2", "ln"] = "log2") -> None:
    """Every LSE FP32 of one source's partial (q = 0) is the logarithm of the count, or WrongResult.

    In full columns the digits sum to 0, so only the LSE shows a total that counts a key too few or too many: that
    moves it by at least log2(2048 / 2047) = 7e-4.
    """
    unit = LN_2 if base == "ln" else 1.0
    expected = math.log2(needle.count) * unit
    seen = lse.detach().to("cpu", torch.float64)
    wrong = ~((seen - expected).abs() <= LSE_TOLERANCE)
    if bool(wrong.any()):
        place = ", ".join(str(index) for index in wrong.nonzero()[0].tolist())
        raise WrongResult(
            f"needle row {place}: LSE (base {base}) is {float(seen[wrong][0]):.7g}, but {needle.count} equal keys "
            f"make {expected:.7g}"
        )


def _explain(needle: Needle, seen: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> str:
    """Name the key that was lost (or counted twice), with or without its share of the total."""
    for times, word in ((-1, "was not counted"), (1, "was counted twice")):
        for in_total in (times, 0):
            difference = seen * ((needle.count + in_total) / needle.count) - expected
            off = ~(difference.abs() <= tolerance)
            if int(off.sum()) != 1:
                continue
            column = int(off.nonzero()[0])
            keys = (needle.columns == column).nonzero()[:, 0]
            match = (needle.digits[keys] * times - difference[column]).abs() <= 2 * tolerance[column]
            if int(match.sum()) == 1:
                return f"key {int(keys[match][0])} {word} (column {column})"
    excess = ((seen - expected).abs() - tolerance).nan_to_num(nan=torch.inf)
    column = int(excess.argmax())
    holders = (needle.columns == column).nonzero()[:, 0].tolist()
    return (
        f"{int((~(excess <= 0)).sum())} columns miscounted; worst is column {column} (keys {holders}): "
        f"its digits sum to {float(seen[column]):.4g}, expected {float(expected[column]):g} "
        f"+- {float(tolerance[column]):.2g}"
    )


def _place(out: torch.Tensor, row: int) -> str:
    """The index of flattened row `row` in the leading dimensions of `out`."""
    index = torch.unravel_index(torch.tensor(row), out.shape[:-1])
    return ", ".join(str(int(part)) for part in index)
