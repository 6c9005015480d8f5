"""Chooses a peer's fastest way to run at a point, checks its rows against the oracle, and writes its entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_decode import oracle
from dcp_decode.checkpoint.peers import Candidate, Peer, PeerSkipped
from dcp_decode.checkpoint.ranks import BenchRanks
from dcp_decode.checkpoint.timing import Series, Stopwatch, Subject
from dcp_decode.numerics import LOG2_E

TUNING_SAMPLES = 7
# A wrong base moves the LSE of a row by 30 % of it, two units or more; BF16 scores and sums move it by 0.2.
LSE_LOG2_TOLERANCE = 0.5

Expected = Callable[[int], oracle.Partial]


@dataclass(frozen=True)
class TimedPeer:
    """A peer as it is timed at a point. error: of its worst (row, head) against the oracle, before the timing."""

    peer: Peer
    candidate: Candidate
    error: float

    @property
    def subject(self) -> Subject:
        return self.candidate.subject(f"peer {self.peer.facts.name}")


def choose(
    peer: Peer, ranks: BenchRanks, stopwatch: Stopwatch, layers: Sequence[int], expected: Expected, largest: float
) -> TimedPeer:
    """The fastest correct candidate of a peer. Raises PeerSkipped. expected: a layer's partial; largest: error."""
    candidates = peer.candidates(ranks)
    if len(candidates) > 1:
        times = stopwatch.measure([one.subject(one.label) for one in candidates], TUNING_SAMPLES, seed=0)
        candidates = sorted(candidates, key=lambda one: times[one.label].p50)
    fastest = candidates[0]
    return TimedPeer(peer, fastest, check(peer, fastest, layers, expected, largest))


def check(peer: Peer, candidate: Candidate, layers: Sequence[int], expected: Expected, largest: float) -> float:
    """Largest relative error of a (row, head) over the layers; raises PeerSkipped if it is above `largest`.

    A peer that is worse than what we allow ourselves computes something else; so does one whose LSE is off.
    """
    worst = 0.0
    for layer in layers:
        candidate.prepare()
        candidate.launch(layer)
        for buffer in candidate.outputs():
            buffer.fill_(float("nan"))
        candidate.prepare()
        candidate.launch(layer)
        partial = expected(layer)
        heads = partial.oracle.shape[1]
        rows, lse = (buffer[:, :heads].double() for buffer in candidate.outputs())
        error = torch.linalg.vector_norm(rows - partial.oracle, dim=-1) / torch.linalg.vector_norm(
            partial.oracle, dim=-1
        )
        off = lse * (LOG2_E if peer.facts.lse_base == "e" else 1.0) - partial.oracle_lse
        worst = max(worst, float(error.max().nan_to_num(nan=torch.inf)))
        if not worst <= largest:
            raise PeerSkipped(f"wrong result: error {worst:.3g}, at most {largest:.3g} is allowed")
        if not float(off.abs().max()) <= LSE_LOG2_TOLERANCE:
            raise PeerSkipped(f"its LSE differs by {float(off.abs().max()):.3g} (base 2) from the oracle's")
    return worst


def entry_of(timed: TimedPeer, series: Series, rounds: list[float]) -> dict[str, Any]:
    """As contract section 7 has it, with the rounds."""
    facts = timed.peer.facts
    return {
        "name": facts.name,
        "kind": facts.kind,
        **series.statistics(),
        "rounds_us": rounds,
        "error": timed.error,
        "bytes_per_key": facts.bytes_per_key,
        "heads_padded_to": timed.candidate.heads_padded_to,
        "lse_base": facts.lse_base,
        "skipped": None,
    }


def skipped_entry(peer: Peer, reason: str) -> dict[str, Any]:
    """A peer that was not measured, and why."""
    facts = peer.facts
    return {
        "name": facts.name,
        "kind": facts.kind,
        "p50_us": None,
        "error": None,
        "bytes_per_key": facts.bytes_per_key,
        "heads_padded_to": None,
        "lse_base": facts.lse_base,
        "skipped": reason,
    }
