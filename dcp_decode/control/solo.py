"""The control plane of a single process: fabric `loopback`, where one process runs all virtual ranks."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed

from dcp_decode.control.plane import Peer

T = TypeVar("T")


class SoloControlPlane:
    """Rank 0 of 1: every operation returns at once."""

    name = "builtin"
    rank = 0
    size = 1

    def __init__(self) -> None:
        self.peers: tuple[Peer, ...] = (Peer.of_this_process(),)

    def all_gather(self, value: T, label: str) -> list[T]:
        return [value]

    def broadcast(self, value: T, label: str) -> T:
        return value

    def barrier(self, label: str) -> None:
        pass

    def dead_peers(self, at_once: bool = False) -> dict[int, str]:
        return {}

    def waits(self) -> list[dict[str, object]]:
        return []

    def torch_store(self) -> torch.distributed.Store:
        return torch.distributed.HashStore()

    def close(self, failure: str | None = None) -> None:
        pass
