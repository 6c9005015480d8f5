"""A control plane over a torch.distributed TCPStore that somebody hosts: the built-in launcher, or torchrun's agent.

One key an operation and rank, deleted when all ranks have passed it. Measured on 2 cores with 8 ranks: 1.2 ms a
barrier. `store.wait` isn't used: each of its timeouts logs two warnings, and it hides which rank is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch.distributed

from dcp_decode.control.plane import PolledControlPlane
from dcp_decode.errors import WaitFailed

FAILURES = "failures"


class StoreControlPlane(PolledControlPlane):
    """Rank `rank` of `size` on a connected store; its deadline bounds every wait."""

    def __init__(
        self, name: str, store: torch.distributed.Store, rank: int, size: int, deadline_seconds: float
    ) -> None:
        super().__init__(rank, size, deadline_seconds)
        self.name = name
        self._store = store
        self.meet()

    def torch_store(self) -> torch.distributed.Store:
        return self._store

    def close(self, failure: str | None = None) -> None:
        with contextlib.suppress(torch.distributed.DistError):  # the host may have ended already
            if failure is None:
                self._store.set(f"left/{self.rank}", "")
            else:
                self._store.append(  # type: ignore[attr-defined]  # torch's stubs know only TCPStore's
                    FAILURES, f"{self.rank} {' '.join(failure.split())}\n"
                )

    def _post(self, sequence: int, payload: bytes) -> None:
        with self._store_errors():
            self._store.set(f"{sequence}/{self.rank}", payload)  # type: ignore[arg-type]  # bytes work, stubs say str

    def _arrivals(self, sequence: int, missing: Collection[int]) -> dict[int, bytes]:
        with self._store_errors():
            keys = [f"{sequence}/{rank}" for rank in missing]
            if self._store.check(keys):  # the usual case in one request: all have arrived
                return dict(zip(missing, self._store.multi_get(keys), strict=True))
            present = [rank for rank, key in zip(missing, keys, strict=True) if self._store.check([key])]
            return {rank: self._store.get(f"{sequence}/{rank}") for rank in present}

    def _retire(self, sequence: int) -> None:
        if sequence >= 0:
            with self._store_errors():
                self._store.delete_key(f"{sequence}/{self.rank}")

    def _failures(self) -> dict[int, str]:
        with contextlib.suppress(torch.distributed.DistError):
            if self._store.check([FAILURES]):
                lines = self._store.get(FAILURES).decode().splitlines()
                return {int(rank): reason for rank, _, reason in (line.partition(" ") for line in lines)}
        return {}

    def _left(self, rank: int) -> bool:
        with contextlib.suppress(torch.distributed.DistError):
            return self._store.check([f"left/{rank}"])
        return False

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except torch.distributed.DistError:
            dead = ", ".join(f"rank {rank} ({reason})" for rank, reason in self.dead_peers().items())
            raise WaitFailed(
                f"rank {self.rank} lost the control store: its host has ended" + (f"; dead: {dead}" if dead else ""),
                self.waits(),
            ) from None
