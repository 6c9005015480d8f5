"""Fabric `loopback`: D virtual ranks in one process, on ordinary tensors of one CPU or one GPU."""

from __future__ import annotations

import torch

from dcp_decode.fabric.memory import SymmetricMemory, address_table


class LoopbackFabric:
    """All ranks share this process; a peer's region is just another tensor."""

    name = "loopback"

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.local_ranks = tuple(range(size))
        self.device = torch.device(device)

    def allocate(self, nbytes: int) -> list[SymmetricMemory]:
        regions = tuple(torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(self.size))
        addresses = address_table(regions)
        return [SymmetricMemory(rank, regions, addresses) for rank in self.local_ranks]

    def close(self) -> None:
        """Nothing to give back: the tensors end with their last reference."""

    def abandon(self) -> None:
        """As `close`."""
