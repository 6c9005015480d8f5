"""What every control plane offers, and the one polled wait that all of them share.

Every operation is an all-gather of one small picklable value a rank, numbered by a sequence that all ranks count
alike. A wait polls the liveness of peers, then arrivals, then its deadline, and none of these blocks for longer than a
fraction of a second: a death is reported within about 0.2 s, and a timeout names exactly the ranks that never came, or
the obstacle that hides them.

Liveness: a peer of this host and PID namespace is dead when /proc/<pid>/stat is gone, is a zombie, or shows another
start time (a reused PID). A rank that leaves in order says so first (`close`), with the reason if it failed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed

from dcp_decode.errors import ControlTimeout, RankDied
from dcp_decode.process_status import process_status

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.0002
LAST_PAUSE_SECONDS = 0.005
LIVENESS_SECONDS = 0.1  # between two looks at the peers: D small files of /proc each


@dataclass(frozen=True)
class Peer:
    """Identity of a rank's process; `domain` is equal for processes that see each other in /proc."""

    hostname: str
    domain: str
    process_id: int
    start_time: int

    @staticmethod
    def of_this_process() -> Peer:
        domain = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
        process_id = os.getpid()
        return Peer(socket.gethostname(), domain, process_id, _start_time(process_id) or 0)

    def ended(self) -> bool:
        """Whether the process is gone, a zombie, or another one with the same PID. Only inside one domain."""
        return _start_time(self.process_id) != self.start_time


def _start_time(process_id: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if it has ended."""
    status = process_status(process_id)
    return None if status is None or status.ended else status.start_time


def deaths(dead: Mapping[int, str]) -> str:
    """What `dead_peers` has found, in words."""
    return "; ".join(f"rank {rank} died ({reason})" for rank, reason in sorted(dead.items()))


class ControlPlane(Protocol):
    """Small collective operations among ranks, with labels that appear in errors.

    Every operation raises RankDied as soon as a peer has died, or ControlTimeout (deadline) naming who never came.
    """

    name: str
    rank: int
    size: int
    peers: tuple[Peer, ...]

    def all_gather(self, value: T, label: str) -> list[T]:
        """The values of all ranks, in rank order."""
        ...

    def broadcast(self, value: T, label: str) -> T:
        """Rank 0's value; also a barrier."""
        ...

    def barrier(self, label: str) -> None: ...

    def dead_peers(self, at_once: bool = False) -> dict[int, str]:
        """Ranks that can't go on, each with the reason; looks at most every LIVENESS_SECONDS unless `at_once`."""
        ...

    def waits(self) -> list[dict[str, object]]:
        """Who this rank is waiting for right now, in the form of `expired_waits`; safe in a signal handler."""
        ...

    def torch_store(self) -> torch.distributed.Store:
        """A key-value store that all ranks share, for whoever needs a torch.distributed process group."""
        ...

    def close(self, failure: str | None = None) -> None:
        """Leave the group in order (failure None), or tell the peers why this rank can't go on. Never raises."""
        ...


class PolledControlPlane(ABC):
    """The shared waits; a subclass moves the payloads."""

    name: str

    def __init__(self, rank: int, size: int, deadline_seconds: float) -> None:
        self.rank = rank
        self.size = size
        self.deadline_seconds = deadline_seconds
        self.peers: tuple[Peer, ...] = ()
        self._sequence = 0
        self._waiting: tuple[str, frozenset[int]] | None = None
        self._dead: dict[int, str] = {}
        self._next_look = 0.0

    def meet(self) -> None:
        """Exchange the peer table; once, before anything else. Deaths before it show only as a timeout."""
        self.peers = tuple(self.all_gather(Peer.of_this_process(), "start"))

    def all_gather(self, value: T, label: str) -> list[T]:
        sequence = self._sequence
        self._sequence += 1
        self._post(sequence, pickle.dumps((label, value)))
        gathered: dict[int, T] = {}
        for rank, payload in self._collect(sequence, label).items():
            their_label, gathered[rank] = pickle.loads(payload)
            if their_label != label:
                raise ControlTimeout(
                    f"control plane out of step: rank {rank} is at '{their_label}', rank {self.rank} at '{label}'"
                )
        self._retire(sequence - 1)
        return [gathered[rank] for rank in range(self.size)]

    def broadcast(self, value: T, label: str) -> T:
        # Everybody posts: a broadcast that is a barrier too keeps every rank's payloads short-lived and in order.
        return self.all_gather(value if self.rank == 0 else None, label)[0]  # type: ignore[return-value]

    def barrier(self, label: str) -> None:
        self.all_gather(None, label)

    def dead_peers(self, at_once: bool = False) -> dict[int, str]:
        now = time.monotonic()
        if at_once or now >= self._next_look:
            self._next_look = now + LIVENESS_SECONDS
            failures = self._failures()
            if failures is None:  # nor is it known who left in order
                return dict(self._dead)
            me = self.peers[self.rank] if self.peers else None
            for rank, peer in enumerate(self.peers):
                if rank == self.rank or rank in self._dead:
                    continue
                if rank in failures:
                    self._dead[rank] = f"stopped: {failures[rank]}"
                elif me is not None and peer.domain == me.domain and peer.ended() and not self._left(rank):
                    self._dead[rank] = f"process {peer.process_id} ended"
        return dict(self._dead)

    def waits(self) -> list[dict[str, object]]:
        if self._waiting is None or self._obstacle() is not None:
            return []
        label, missing = self._waiting
        return [
            {"stage": "control", "label": label, "waiting_rank": self.rank, "source_rank": source}
            for source in sorted(missing)
        ]

    def _collect(self, sequence: int, label: str) -> dict[int, bytes]:
        """Payloads of all ranks at one sequence number."""
        arrived: dict[int, bytes] = {}
        started = time.monotonic()
        pause = FIRST_PAUSE_SECONDS
        answered, died_before = True, False
        while True:
            # Asked before the arrivals: a process that was itself stopped has not looked at them yet.
            expired = time.monotonic() - started > self.deadline_seconds
            # Looked at before the arrivals: a peer that has all answers may fail over them, and its own still counts.
            dead = self.dead_peers()
            if answered:
                died_before = bool(dead)
            arrivals = self._arrivals(sequence, set(range(self.size)) - arrived.keys())
            answered = arrivals is not None
            arrived.update(arrivals or {})
            missing = frozenset(range(self.size)) - arrived.keys()
            if not missing:
                self._waiting = None
                return arrived
            self._waiting = (label, missing)
            if (answered and died_before) or (expired and dead):
                self._refuse(dead, label)
            if expired:
                waited = f"rank {self.rank} waited {self.deadline_seconds:g} s at '{label}'"
                obstacle = self._obstacle()
                if obstacle is not None:
                    raise ControlTimeout(f"{waited}: {obstacle}")
                raise ControlTimeout(f"{waited} for {_ranks(missing)}", self.waits())
            time.sleep(pause)
            pause = min(pause * 1.5, LAST_PAUSE_SECONDS)

    def _refuse(self, dead: dict[int, str], label: str) -> None:
        raise RankDied(f"{deaths(dead)}; rank {self.rank} was at '{label}'", self.waits())

    @abstractmethod
    def _post(self, sequence: int, payload: bytes) -> None:
        """Make this rank's payload visible to all ranks; doesn't wait."""

    @abstractmethod
    def _arrivals(self, sequence: int, missing: Collection[int]) -> dict[int, bytes] | None:
        """Payloads of those missing ranks that have posted; waits for none of them.

        None: the answer to what was asked is still to come, and the next call gives that one.
        """

    @abstractmethod
    def _retire(self, sequence: int) -> None:
        """All ranks have passed this sequence number (negative: none has)."""

    def _obstacle(self) -> str | None:
        """Why nobody's payload can arrive, where that is no rank's doing; safe in a signal handler."""
        return None

    def _failures(self) -> dict[int, str] | None:
        """Ranks that have said why they can't go on; None if that can't be known now."""
        return {}

    def _left(self, rank: int) -> bool:
        """Whether a rank whose process has ended left in order, as far as can be known now."""
        return False


def _ranks(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def host_torch_store(control: ControlPlane, deadline_seconds: float) -> torch.distributed.Store:
    """A new TCPStore hosted by rank 0, for control planes that have none of their own. Collective."""
    timeout = timedelta(seconds=deadline_seconds)
    store = None
    if control.rank == 0:
        store = torch.distributed.TCPStore("0.0.0.0", 0, None, True, timeout=timeout, wait_for_workers=False)
    address = (control.peers[0].hostname, store.port) if store is not None else None
    host, port = control.broadcast(address, "torch store")  # type: ignore[misc]
    if store is None:
        with contextlib.suppress(OSError):
            host = socket.gethostbyname(host)
        store = torch.distributed.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
    return store
