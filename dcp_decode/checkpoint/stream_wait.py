"""Waits for a stream of a group's rank that end: mailbox waits have deadlines, a captured NCCL collective has none.

torch's watchdog looks after collectives that were enqueued eagerly, not after those that a graph replays: with a peer
gone or stopped, they spin on, and so would a synchronisation with their stream.
"""

from __future__ import annotations

import time
from typing import Protocol

from dcp_decode.control.plane import ControlPlane, deaths
from dcp_decode.errors import ControlTimeout, RankDied

PAUSE_SECONDS = 0.0001


class Stream(Protocol):
    """What is needed of `torch.cuda.Stream`."""

    def query(self) -> bool:
        """Whether all that is enqueued has ended."""
        ...


def await_stream(stream: Stream, control: ControlPlane, deadline_seconds: float, label: str) -> None:
    """Until all that is enqueued on the stream has ended.

    Raises RankDied if a peer has, ControlTimeout after the deadline; both name `label`, and the GPU may be busy still.
    """
    until = time.monotonic() + deadline_seconds
    while not stream.query():
        dead = control.dead_peers()
        if dead:
            raise RankDied(f"{deaths(dead)}; the GPU of rank {control.rank} was at '{label}'")
        if time.monotonic() > until:
            raise ControlTimeout(
                f"rank {control.rank} waited {deadline_seconds:g} s at '{label}' for its GPU: do all peers take part?"
            )
        time.sleep(PAUSE_SECONDS)
