"""Waits of a group's rank for its GPU, with stand-ins for the stream: each of them ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dcp_decode.checkpoint.stream_wait import await_stream  # noqa: E402
from dcp_decode.config import load_config  # noqa: E402
from dcp_decode.control.solo import SoloControlPlane  # noqa: E402
from dcp_decode.errors import ControlTimeout, RankDied  # noqa: E402

DEADLINE = 0.2


class Stream:
    """A stream whose work ends after so many looks, or never."""

    def __init__(self, looks: int | None) -> None:
        self.left = looks

    def query(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        assert self.left is not None, "would wait for ever"


class Widowed(SoloControlPlane):
    """Of a rank whose peer has died."""

    def dead_peers(self, at_once: bool = False) -> dict[int, str]:
        return {1: "process 7 ended"}


def test_work_that_ends_is_waited_for() -> None:
    stream = Stream(50)
    await_stream(stream, SoloControlPlane(), 5.0, "round 3")
    assert stream.left == -1


def test_work_that_never_ends_is_named_after_the_deadline() -> None:
    started = time.monotonic()
    with pytest.raises(ControlTimeout, match=r"^rank 0 waited 0\.2 s at 'round 3' for its GPU"):
        await_stream(Stream(None), SoloControlPlane(), DEADLINE, "round 3")
    assert DEADLINE <= time.monotonic() - started < DEADLINE + 1


def test_a_dead_peer_ends_the_wait_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(RankDied, match=r"^rank 1 died \(process 7 ended\); the GPU of rank 0 was at 'round 3'"):
        await_stream(Stream(None), Widowed(), 60.0, "round 3")
    assert time.monotonic() - started < 1
    await_stream(Stream(0), Widowed(), 60.0, "round 3")  # its work had ended


class Chain:
    """Enqueues nothing."""

    def __init__(self) -> None:
        self.merged = torch.zeros(2, dtype=torch.bfloat16)
        self.launched: list[int] = []

    def launch(self, layer: int) -> None:
        self.launched.append(layer)

    def rewind(self) -> None: ...


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank of a group whose GPU never ends what it has begun."""
    pytest.importorskip("cutlass")
    from dcp_decode.checkpoint import group

    stuck = Stream(None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stuck)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: stuck.synchronize())
    monkeypatch.setattr(group, "replay", lambda graph, prepare, *_: prepare())
    made = object.__new__(group.GroupCheckpoint)
    deadlines = {"mailbox.deadline_seconds": DEADLINE, "mailbox.control_deadline_seconds": DEADLINE}
    made.config, made.control, made.stream = load_config(None, deadlines), SoloControlPlane(), stuck
    made.layers, made.aligning_layer, made.samples = 4, 4, 3
    return made


@pytest.mark.parametrize(
    ("wait", "label"),
    [
        (lambda rank, chain: rank._replay(None, chain, lambda: None, "round 0 of point"), "round 0 of point"),
        (lambda rank, chain: rank._time(chain, lambda: None, "point"), "first layer of point"),
        (lambda rank, chain: rank._require_same_rows(chain, chain, "point, NCCL"), "point, NCCL"),
        (lambda rank, chain: rank._pass_gate(chain, "point"), "gate of point"),
    ],
    ids=["replay", "capture", "same rows", "gate"],
)
def test_every_wait_of_a_group_ends(rank: Any, wait: Callable[[Any, Chain], object], label: str) -> None:
    chain = Chain()
    chain.problem = SimpleNamespace(geometry=None)  # type: ignore[attr-defined]
    with pytest.raises(ControlTimeout, match=f"at '{label}' for its GPU"):
        wait(rank, chain)
    assert len(chain.launched) == 1
