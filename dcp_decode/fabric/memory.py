"""What every fabric hands out: one region of symmetric memory, seen by its own rank and by all peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dcp_decode.errors import UnsupportedEnvironment


@dataclass(frozen=True)
class SymmetricMemory:
    """One rank's view of a symmetric allocation: its own region and every peer's.

    rank: the rank whose view this is. regions: D tensors, uint8 [nbytes], regions[rank] the local one.
    addresses: int64 [D], the base address of each region as this rank's kernels see it, on the kernels' device.
    handle: whatever must stay alive while the regions are used.
    """

    rank: int
    regions: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    handle: object = None

    @property
    def local(self) -> torch.Tensor:
        return self.regions[self.rank]

    @property
    def nbytes(self) -> int:
        return self.local.numel()


class Fabric(Protocol):
    """Allocates symmetric memory among D ranks, of which this process runs `local_ranks`."""

    name: str
    size: int
    local_ranks: tuple[int, ...]
    device: torch.device

    def allocate(self, nbytes: int) -> list[SymmetricMemory]:
        """One view for each local rank; collective over the ranks, in the same order everywhere."""
        ...

    def close(self) -> None:
        """Give all allocations back; collective, after a barrier of the caller's."""
        ...

    def abandon(self) -> None:
        """Instead of `close` after a failure: nothing that would wait for another rank."""
        ...


def refuse_if_any(refusals: Sequence[str]) -> None:
    """Raise UnsupportedEnvironment, the same on every rank, if one of the ranks refuses. refusals: by rank, or ""."""
    for rank, reason in enumerate(refusals):
        if reason:
            raise UnsupportedEnvironment(f"rank {rank}: {reason}")


def address_table(regions: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """int64 [D] of the regions' base addresses, on the regions' device."""
    return torch.tensor([region.data_ptr() for region in regions], dtype=torch.int64, device=regions[0].device)
