"""What a run leaves: digests, key counts and times of every rank, and the summary that they make together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from dcp_decode.device_steps import StepStatistics
from dcp_decode.digest import rows_digest
from dcp_decode.records import RankReport
from dcp_decode.statistics import stage_statistics
from dcp_decode.step import Batch, LayerRun, StepResult, timed_seconds
from dcp_decode.verification import WorstRow


@dataclass
class RankSummary:
    """What one (virtual) rank brings to the run's summary.

    digests: SHA-256 of each (step, layer)'s real rows. seconds: per (step, layer), one entry a TIMED stage.
    keys: histogram over (step, layer, row) of the keys the rank held, index = count.
    """

    rank: int
    keys: np.ndarray
    digests: list[bytes] = field(default_factory=list)
    seconds: list[tuple[float, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class RunSummary:
    """A whole run, the same on every rank. Times in seconds per (step, layer), the maximum over ranks.

    keys_a_row: of all (step, layer, row, rank); None if no step ran, because every request was refused.
    stage_clock: how the stage times came, or why there are none. execution: how a GPU ran the steps (`execution_of`).
    """

    fabric: str
    fabric_reason: str
    family: str
    device: str
    requests: dict[str, int]
    refusals: list[str]
    steps: int
    tokens: int
    acceptance: list[int]
    verified: bool | None
    checked_steps: int
    worst: WorstRow
    digest: str
    keys_a_row: dict[str, int] | None
    stage_seconds: dict[str, np.ndarray]
    stage_clock: str
    execution: dict[str, object] | None

    def report(self) -> RankReport:
        """The figures in the form of a rank's record."""
        checked = self.worst.bound > 0
        keys = self.keys_a_row
        return RankReport(
            fabric=self.fabric,
            device=self.device,
            family=self.family,
            verified=self.verified,
            worst_error=self.worst.error if checked else None,
            error_bound=self.worst.bound if checked else None,
            checked_steps=self.checked_steps,
            digest=self.digest,
            requests=self.requests,
            refusals=self.refusals,
            steps=self.steps,
            tokens=self.tokens,
            acceptance=self.acceptance,
            worst_row=self.worst.place if checked else None,
            keys_per_row=None if keys is None else (keys["min"], keys["median"], keys["max"]),
            stages={name: stage_statistics(seconds) for name, seconds in self.stage_seconds.items()},
            stage_clock=self.stage_clock,
            fabric_reason=self.fabric_reason,
            execution=self.execution,
        )


def account(summary: RankSummary, run: LayerRun[Batch]) -> None:
    """Of a layer on the CPU."""
    summary.digests.append(rows_digest(run.merged))
    summary.keys += np.bincount(run.valid.numpy(), minlength=len(summary.keys))
    summary.seconds.append(timed_seconds(run.seconds))


def account_step(summaries: list[RankSummary], result: StepResult) -> None:
    """Of all layers on a device, for all local ranks. Stages of a graph replay have no times of their own."""
    for index, summary in enumerate(summaries):
        summary.digests += result.digests[index :: len(summaries)]
        summary.keys += np.bincount(result.valid[:, index].ravel(), minlength=len(summary.keys))


def execution_of(asked: str, processes: list[StepStatistics]) -> dict[str, object] | None:
    """How the steps ran on GPUs, for the results: counts of one process, host time and memory the most of any."""
    if not processes:
        return None
    first = processes[0]

    def slowest(name: str) -> dict[str, float]:
        """Statistics over the replays of the most that any process took for each."""
        return stage_statistics(np.array([getattr(process, name) for process in processes]).max(axis=0))

    return {
        "asked": asked,
        "replays": first.replays,
        "eager_steps": first.eager_steps,
        "captures": first.captures,
        "host_work": slowest("host_seconds"),
        "replayed_step": slowest("step_seconds"),
        "device_bytes": {
            "after_last_capture": max(process.bytes_after_capture for process in processes),
            "at_end": max(process.bytes_at_end for process in processes),
        },
        "notes": first.notes,
    }


def spread(keys: np.ndarray) -> dict[str, int]:
    return {"min": int(keys.min()), "median": int(np.median(keys)), "max": int(keys.max())}


def run_digest(summaries: list[RankSummary]) -> str:
    """SHA-256 over the digests in (step, layer, rank) order."""
    whole = hashlib.sha256()
    for iteration in zip(*(summary.digests for summary in summaries), strict=True):
        for digest in iteration:
            whole.update(digest)
    return whole.hexdigest()
