"""The polled wait of the control planes: scripted peers between two looks, and a real store whose host is stopped."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch.distributed

from dcp_decode.control.plane import ControlPlane, Peer, PolledControlPlane
from dcp_decode.control.store import LOOK_SECONDS, StoreControlPlane
from dcp_decode.errors import WAIT_EXPIRED, ControlTimeout, RankDied, WaitFailed
from dcp_decode.process_status import process_status
from dcp_decode.rank_process import LAST_WORDS_SECONDS, RankProcess
from dcp_decode.records import RankReport, read_records

pytestmark = pytest.mark.xdist_group("processes")

T = TypeVar("T")


class ScriptedPlane(PolledControlPlane):
    """Rank 0 of 2. The peer fails when rank 0 first looks at its liveness; just before, it posts or does not."""

    name = "scripted"

    def __init__(self, posts_before_failing: bool) -> None:
        super().__init__(0, 2, 5.0)
        self.peers = (Peer.of_this_process(),) * 2
        self.posts_before_failing = posts_before_failing
        self.posted: dict[int, bytes] = {}

    def _post(self, sequence: int, payload: bytes) -> None:
        self.posted[0] = payload

    def _arrivals(self, sequence: int, missing: Collection[int]) -> dict[int, bytes]:
        return {rank: payload for rank, payload in self.posted.items() if rank in missing}

    def _retire(self, sequence: int) -> None:
        pass

    def _failures(self) -> dict[int, str]:
        if self.posts_before_failing:
            self.posted[1] = pickle.dumps(("refusals", "short of memory"))
        return {1: "short of memory"}


def test_what_a_peer_posted_before_it_failed_still_counts() -> None:
    """A refusal that all ranks agree on: the first to have every answer leaves while others still collect them."""
    assert ScriptedPlane(True).all_gather("", "refusals") == ["", "short of memory"]


def test_peer_that_fails_without_posting_is_named() -> None:
    with pytest.raises(RankDied, match=r"rank 1 died \(stopped: short of memory\); rank 0 was at 'refusals'"):
        ScriptedPlane(False).all_gather("", "refusals")


class StoppedPlane(ScriptedPlane):
    """This process is stopped during its first look at the arrivals, for longer than the deadline."""

    def __init__(self) -> None:
        super().__init__(True)
        self.deadline_seconds = 0.05
        self.posted[1] = pickle.dumps(("start", 1))
        self.looks = 0

    def _arrivals(self, sequence: int, missing: Collection[int]) -> dict[int, bytes] | None:
        self.looks += 1
        if self.looks > 1:
            return super()._arrivals(sequence, missing)
        time.sleep(3 * self.deadline_seconds)
        return None

    def _failures(self) -> dict[int, str]:
        return {}


class SlowPlane(ScriptedPlane):
    """What arrives at the second look was asked for at the first, before or after the peer had posted and failed."""

    def __init__(self, failed_before: bool) -> None:
        super().__init__(True)
        self.failed_before = failed_before
        self.looks = 0

    def _arrivals(self, sequence: int, missing: Collection[int]) -> dict[int, bytes] | None:
        self.looks += 1
        if self.looks == 1:
            return None
        return {} if self.looks == 2 and not self.failed_before else super()._arrivals(sequence, missing)

    def _failures(self) -> dict[int, str]:
        self._next_look = 0.0
        return super()._failures() if self.looks or self.failed_before else {}


@pytest.mark.parametrize("failed_before", [True, False])
def test_what_a_peer_posted_before_it_failed_still_counts_when_answers_are_slow(failed_before: bool) -> None:
    assert SlowPlane(failed_before).all_gather("", "refusals") == ["", "short of memory"]


def test_a_process_that_was_stopped_looks_once_more() -> None:
    assert StoppedPlane().all_gather(0, "start") == [0, 1]


@dataclass
class StoreHost:
    """A process that hosts a store, and can be stopped."""

    port: int
    process_id: int
    planes: list[StoreControlPlane] = field(default_factory=list)
    connected: list[threading.Event] = field(default_factory=list)

    def connect(self, deadline_seconds: float) -> torch.distributed.Store:
        timeout = timedelta(seconds=deadline_seconds)
        self.connected.append(connected := threading.Event())
        try:
            return torch.distributed.TCPStore(
                "127.0.0.1", self.port, None, False, timeout=timeout, wait_for_workers=False
            )
        finally:
            connected.set()

    def plane(self, rank: int, deadline_seconds: float) -> StoreControlPlane:
        """Of rank `rank` of 2; returns once both have met."""
        plane = StoreControlPlane(
            "test", "the store", lambda: self.connect(deadline_seconds), rank, 2, deadline_seconds
        )
        self.planes.append(plane)
        return plane

    def end(self) -> None:
        """Returns once no thread is in a call of the store: the next test forks."""
        os.kill(self.process_id, signal.SIGKILL)
        os.waitpid(self.process_id, 0)
        assert all(connected.wait(20) for connected in self.connected)
        for plane in self.planes:
            plane._calls.submit(lambda: None).result(20)

    def stop(self) -> None:
        os.kill(self.process_id, signal.SIGSTOP)
        while not (status := process_status(self.process_id)) or not status.stopped:
            time.sleep(0.001)


@pytest.fixture
def host() -> Iterator[StoreHost]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(4)
    port = listener.getsockname()[1]
    process_id = os.fork()
    if process_id == 0:
        timeout = timedelta(seconds=5)
        hosted = torch.distributed.TCPStore(
            "127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        time.sleep(120 if hosted else 0)
        os._exit(0)
    listener.close()
    hosting = StoreHost(port, process_id)
    yield hosting
    hosting.end()


def both(action: Callable[[int], T]) -> list[T]:
    """What ranks 0 and 1 get, each in a thread of its own."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(action, range(2)))


def seconds_of(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def test_a_store_that_stops_answering_keeps_the_deadline(host: StoreHost) -> None:
    planes = both(lambda rank: host.plane(rank, 1.5))
    both(lambda rank: planes[rank].barrier("one"))
    host.stop()

    def wait(rank: int) -> tuple[float, ControlTimeout]:
        started = time.monotonic()
        with pytest.raises(ControlTimeout) as failure:
            planes[rank].barrier("two")
        return time.monotonic() - started, failure.value

    for rank, (seconds, error) in enumerate(both(wait)):
        assert 1.5 <= seconds < 3
        assert str(error).startswith(f"rank {rank} waited 1.5 s at 'two': the store has not answered for 1.")
        assert (error.exit_code, error.expired_waits, planes[rank].waits()) == (WAIT_EXPIRED, [], [])
    assert seconds_of(lambda: planes[0].close("it failed")) < 2


def test_looks_at_the_peers_are_short_while_the_store_is_silent(host: StoreHost) -> None:
    planes = both(lambda rank: host.plane(rank, 60.0))
    host.stop()
    looks = []
    until = time.monotonic() + 3 * LOOK_SECONDS
    while time.monotonic() < until:
        looks.append(seconds_of(planes[0].dead_peers))
        time.sleep(0.001)
    assert max(looks) < 2 * LOOK_SECONDS
    assert sum(looks) < 2 * LOOK_SECONDS  # one of them has waited, the others have not
    assert planes[0].dead_peers(at_once=True) == {}


def test_a_short_silence_of_the_store_loses_nothing(host: StoreHost) -> None:
    planes = both(lambda rank: host.plane(rank, 20.0))
    host.stop()
    threading.Timer(3 * LOOK_SECONDS, os.kill, (host.process_id, signal.SIGCONT)).start()
    assert both(lambda rank: planes[rank].all_gather(rank + 5, "through it")) == [[5, 6], [5, 6]]
    planes[1].close("a defect")
    with pytest.raises(RankDied, match=r"rank 1 died \(stopped: a defect\); rank 0 was at 'after it'"):
        planes[0].barrier("after it")


def test_a_store_that_never_answers_keeps_the_deadline_of_its_connection(host: StoreHost) -> None:
    both(lambda rank: host.plane(rank, 20.0))  # else it may be stopped before it serves
    host.stop()
    started = time.monotonic()
    with pytest.raises(ControlTimeout, match=r"rank 1 waited 0\.5 s to connect: the store does not answer"):
        host.plane(1, 0.5)
    assert time.monotonic() - started < 2


def test_a_store_that_has_ended_is_named(host: StoreHost) -> None:
    planes = both(lambda rank: host.plane(rank, 20.0))
    os.kill(host.process_id, signal.SIGKILL)  # a zombie until the end of the test
    with pytest.raises(WaitFailed, match="rank 0 lost the store: its host has ended"):
        planes[0].barrier("one")


def test_keys_of_operations_that_all_ranks_have_passed_are_deleted(host: StoreHost) -> None:
    planes = both(lambda rank: host.plane(rank, 20.0))
    for turn in range(20):
        both(lambda rank, turn=turn: planes[rank].barrier(f"turn {turn}"))
    store = host.connect(5.0)
    until = time.monotonic() + 5
    # Of each rank the key of the last operation; a deletion isn't waited for.
    while store.num_keys() > 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert store.num_keys() <= 3  # with one of torch's own


def test_ranks_told_to_stop_leave_in_time_while_the_store_is_silent(host: StoreHost, tmp_path: Path) -> None:
    def body(control: ControlPlane) -> RankReport:
        control.barrier("together")
        if control.rank == 0:
            time.sleep(0.2)  # until rank 1 has the answer too
            host.stop()
        control.barrier("never")
        raise AssertionError("the store answered")

    ranks = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            process = RankProcess(rank, tmp_path)
            process.handle_terminate()
            os._exit(process.run(lambda rank=rank: host.plane(rank, 60.0), body).exit_code)
        ranks.append(child)
    while not (status := process_status(host.process_id)) or not status.stopped:
        time.sleep(0.01)
    time.sleep(0.3)
    started = time.monotonic()
    for child in ranks:
        os.kill(child, signal.SIGTERM)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks] == [WAIT_EXPIRED] * 2
    assert time.monotonic() - started < 2 * LAST_WORDS_SECONDS + 1
    assert [record.outcome for record in read_records(tmp_path).values()] == ["terminated"] * 2
    assert all((tmp_path / f"forensics-{rank}.json").exists() for rank in range(2))
