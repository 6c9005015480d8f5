"""A needle that is addressed: which value row goes with which probability, and whose (row, head) it reaches.

The 64 rope bytes of a key, no part of its value, become a +-magnitude sign code; a query whose rope bytes are the code
of key t and whose latent bytes are zero scores t above all others by at least `MARGIN` powers of two. So the output is
the value row of t alone, one digit in one column, and any other pairing of probability and value shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_decode.geometry import Geometry
from dcp_decode.needle import BF16_UNIT, Needle
from dcp_decode.numerics import LATENT_DIM, ROPE_DIM, ROW_BYTES, e4m3_bytes, e4m3_values

MARGIN = 24.0  # 2048 keys at 2**-24 of the needle's weight are 2**-13 of it; P below 2**-19 of its anchor is zero


@dataclass(frozen=True)
class AddressedNeedle:
    """A needle with key_bytes uint8 [count, 576] that also carry codes."""

    needle: Needle
    key_bytes: torch.Tensor

    def queries(self, targets: torch.Tensor) -> torch.Tensor:
        """Query bytes uint8 [..., 576] that single out key targets[...] (int64)."""
        queries = torch.zeros(*targets.shape, ROW_BYTES, dtype=torch.uint8)
        queries[..., LATENT_DIM:] = self.key_bytes[targets, LATENT_DIM:]
        return queries

    def misses(self, out: torch.Tensor, targets: torch.Tensor) -> list[tuple[int, int | None]]:
        """Of rows BF16 [..., 512] that are not the value of key targets[...]: that key, and the key seen, if one is."""
        wanted = targets.flatten()
        expected = e4m3_values(self.key_bytes[wanted, :LATENT_DIM], torch.float64)
        seen = out.to(torch.float64).flatten(0, -2) / self.needle.k_scale
        # Two BF16 roundings of the digit; elsewhere 2048 keys at 2**-24, each digit below 32.
        tolerance = 2.01 * BF16_UNIT * expected.abs() + 2.0 ** (11 + 5 - MARGIN)
        wrong = ~((seen - expected).abs() <= tolerance)
        return [(int(wanted[row]), self._key_of(seen[row])) for row in wrong.any(1).nonzero()[:, 0].tolist()]

    def _key_of(self, seen: torch.Tensor) -> int | None:
        column = int(seen.abs().nan_to_num(nan=torch.inf).argmax())
        held = (self.needle.columns == column) & ((self.needle.digits - seen[column]).abs() < 0.5)
        return int(held.nonzero()[0]) if bool(held.any()) else None


def address(needle: Needle, seed: int, geometry: Geometry) -> AddressedNeedle:
    """The needle with codes that `seed` decides, and the smallest magnitude that separates them by MARGIN."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (needle.count, ROPE_DIM), generator=generator).double() * 2 - 1
    agreement = (signs @ signs.mT).fill_diagonal_(-float(ROPE_DIM))
    unit = (ROPE_DIM - float(agreement.max())) * geometry.scale_log2
    magnitude = next(2.0**power for power in range(9) if unit * 4.0**power >= MARGIN)
    key_bytes = needle.key_bytes.clone()
    key_bytes[:, LATENT_DIM:] = e4m3_bytes((signs * magnitude).float())
    return AddressedNeedle(needle, key_bytes)
