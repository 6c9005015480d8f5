"""A control plane over a torch.distributed TCPStore that somebody hosts: the built-in launcher, or torchrun's agent.

One key an operation and rank, deleted when all ranks have passed it. Measured on 2 shared cores: 0.6 ms a
barrier with 2 ranks, 3 to 4 ms with 8. `store.wait` isn't used: each of its timeouts logs two warnings, and it hides
which rank is missing.

A store whose host is stopped answers nothing for ever, so no call is waited for without a time (`store_calls`): an
operation has its deadline, and the look at the peers LOOK_SECONDS, once while the store is silent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed

from dcp_decode.control.plane import LIVENESS_SECONDS, PolledControlPlane
from dcp_decode.control.store_calls import StoreCalls
from dcp_decode.errors import ControlTimeout, WaitFailed

T = TypeVar("T")

FAILURES = "failures"
LOOK_SECONDS = 0.2  # an answer takes under a millisecond, more where ranks share cores
CLOSE_SECONDS = 1.0
CONNECT_GRACE_SECONDS = 0.5  # a store that can't be connected says so itself, at the deadline
SILENT_SECONDS = 1.0  # after this without an answer the store is why a wait can't end, not the ranks


class StoreControlPlane(PolledControlPlane):
    """Rank `rank` of `size` on the store that `connect` gives; its deadline bounds every wait, that for it included.

    where: what the store is called in errors.
    """

    def __init__(
        self,
        name: str,
        where: str,
        connect: Callable[[], torch.distributed.Store],
        rank: int,
        size: int,
        deadline_seconds: float,
    ) -> None:
        super().__init__(rank, size, deadline_seconds)
        self.name = name
        self.where = where
        self._calls = StoreCalls()
        self._posted: Future[None] | None = None
        self._asked: Future[dict[int, bytes]] | None = None
        self._asked_at = 0.0
        self._unanswered_look: Future[Any] | None = None
        try:
            self._store = self._calls.submit(connect).result(deadline_seconds + CONNECT_GRACE_SECONDS)
        except TimeoutError:
            raise ControlTimeout(
                f"rank {rank} waited {deadline_seconds:g} s to connect: {where} does not answer"
            ) from None
        self.meet()

    def torch_store(self) -> torch.distributed.Store:
        return self._store

    def close(self, failure: str | None = None) -> None:
        def say() -> None:
            if failure is None:
                self._store.set(f"left/{self.rank}", "")
            else:
                self._store.append(  # type: ignore[attr-defined]  # torch's stubs know only TCPStore's
                    FAILURES, f"{self.rank} {' '.join(failure.split())}\n"
                )

        # The host may have ended already, or be silent.
        with contextlib.suppress(torch.distributed.DistError, TimeoutError):
            self._calls.submit(say).result(CLOSE_SECONDS)

    def _post(self, sequence: int, payload: bytes) -> None:
        self._asked = None  # of an operation that failed
        self._posted = self._calls.submit(
            lambda: self._store.set(f"{sequence}/{self.rank}", payload)  # type: ignore[arg-type]  # stubs say str
        )

    def _arrivals(self, sequence: int, missing: Collection[int]) -> dict[int, bytes] | None:
        if self._asked is None:
            ranks = tuple(missing)
            self._asked_at = time.monotonic()
            self._asked = self._calls.submit(lambda: self._read(sequence, ranks))
        try:
            with self._store_errors():
                arrived = self._asked.result(LIVENESS_SECONDS)
                assert self._posted is not None
                self._posted.result(0)  # made before it
        except TimeoutError:
            return None
        self._asked = None
        return arrived

    def _read(self, sequence: int, ranks: Collection[int]) -> dict[int, bytes]:
        keys = [f"{sequence}/{rank}" for rank in ranks]
        if self._store.check(keys):  # the usual case in one request: all have arrived
            return dict(zip(ranks, self._store.multi_get(keys), strict=True))
        present = [rank for rank, key in zip(ranks, keys, strict=True) if self._store.check([key])]
        return {rank: self._store.get(f"{sequence}/{rank}") for rank in present}

    def _retire(self, sequence: int) -> None:
        if sequence >= 0:  # not waited for: a store that is lost says so at the next operation
            self._calls.submit(lambda: self._store.delete_key(f"{sequence}/{self.rank}"))

    def _obstacle(self) -> str | None:
        asked, silent_since = self._asked, self._asked_at
        if asked is None or asked.done():
            return None
        silent = time.monotonic() - silent_since
        if silent < min(SILENT_SECONDS, self.deadline_seconds / 2):
            return None
        return f"{self.where} has not answered for {silent:.1f} s"

    def _failures(self) -> dict[int, str] | None:
        nobody: dict[int, str] | None = {}

        def read() -> dict[int, str] | None:
            if not self._store.check([FAILURES]):
                return nobody
            lines = self._store.get(FAILURES).decode().splitlines()
            return {int(rank): reason for rank, _, reason in (line.partition(" ") for line in lines)}

        return self._look(read, silent=None, lost=nobody)

    def _left(self, rank: int) -> bool:
        return self._look(lambda: self._store.check([f"left/{rank}"]), silent=True, lost=False)

    def _look(self, read: Callable[[], T], silent: T, lost: T) -> T:
        """What the store says; `silent` without an answer, `lost` if its host has ended."""
        if self._unanswered_look is not None and not self._unanswered_look.done():
            return silent  # one wait for a silent store is enough: a polling loop makes ten looks a second
        look = self._calls.submit(read)
        try:
            return look.result(LOOK_SECONDS)
        except TimeoutError:
            self._unanswered_look = look
            return silent
        except torch.distributed.DistError:
            return lost

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except torch.distributed.DistError:
            dead = ", ".join(f"rank {rank} ({reason})" for rank, reason in self.dead_peers().items())
            raise WaitFailed(
                f"rank {self.rank} lost {self.where}: its host has ended" + (f"; dead: {dead}" if dead else ""),
                self.waits(),
            ) from None
