"""The polled wait of the control planes against scripted peers: who posts, and who fails, between two looks."""

from __future__ import annotations

import pickle
from collections.abc import Collection

import pytest

from dcp_decode.control.plane import Peer, PolledControlPlane
from dcp_decode.errors import RankDied


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
