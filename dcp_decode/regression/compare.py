"""Base and new measurement -> a verdict a stage of every point, and the gate's exit code.

    ratio = (new stage / new baseline) / (base stage / base baseline)

    slower      the whole interval lies above the limit: a regression
    undecided   the interval holds the limit: the noise hides whether it is one
    ok          the whole interval lies at or below the limit

The baseline is measured in the same run, round by round: a peer (Triton's first) for the stages that decode, the launch
floor for those that only push or merge; without one, absolute times are compared, and a note says so. The confidence
holds for all verdicts together (Bonferroni), so a long table raises no more false alarms than a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dcp_decode.regression.documents import (
    Document,
    IncomparableInputs,
    Point,
    Statistics,
    read_document,
    validate,
)
from dcp_decode.regression.interval import (
    LEAST_ROUNDS,
    Estimate,
    Interval,
    estimate_percentiles,
    estimate_rounds,
    interval,
)

CONFIDENCE = 0.99
DEFAULT_LIMIT = 1.05
LAUNCH_FLOOR = "floor launch"
PEER_STAGES = frozenset({"sparse_decode", "chain"})
PEER_PACKAGES = ("triton", "torch", "numpy")  # another version of these is another baseline

Verdict = Literal["ok", "undecided", "slower"]


@dataclass(frozen=True)
class StageComparison:
    """One stage of one point. base, new: its time over the baseline's (microseconds without one).

    detectable: the smallest true ratio that this noise would have let the gate call slower.
    """

    point: str
    stage: str
    baseline: str | None
    base: float
    new: float
    change: Interval
    detectable: float
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """All stages, and what the reader should know besides."""

    limit: float
    confidence: float
    stages: tuple[StageComparison, ...]
    notes: tuple[str, ...]

    def of_verdict(self, verdict: Verdict) -> list[StageComparison]:
        return [stage for stage in self.stages if stage.verdict == verdict]


def compare(base: object, new: object, limit: float = DEFAULT_LIMIT, confidence: float = CONFIDENCE) -> Comparison:
    """Compare two parsed results documents. Raises IncomparableInputs, naming the field."""
    return compare_documents(validate(base), validate(new), limit, confidence)


def compare_files(base: Path, new: Path, limit: float, confidence: float = CONFIDENCE) -> Comparison:
    """`compare` on two files."""
    return compare_documents(read_document(base), read_document(new), limit, confidence)


def compare_documents(base: Document, new: Document, limit: float, confidence: float) -> Comparison:
    """`compare` on validated documents."""
    _require_same_setting(base, new)
    notes = [
        f"versions.{package}: {base.versions[package]} in base, {new.versions[package]} in new"
        for package in PEER_PACKAGES
        if package in base.versions.keys() & new.versions.keys() and base.versions[package] != new.versions[package]
    ]
    base_points, new_points = base.measured(), new.measured()
    notes += [f"{name}: only in new" for name in new_points.keys() - base_points.keys()]
    pairs = list(_pairs(base_points, new_points, notes))
    if not pairs:
        raise IncomparableInputs("points: no stage has times in base")
    each = 1 - (1 - confidence) / len(pairs)
    stages = tuple(_judge(pair, limit, each) for pair in pairs)
    return Comparison(limit, confidence, stages, tuple(dict.fromkeys(notes)))


@dataclass(frozen=True)
class _Pair:
    """A stage in both documents: log of its time over the baseline's, with its error."""

    point: str
    stage: str
    baseline: str | None
    base: Estimate
    new: Estimate


def _judge(pair: _Pair, limit: float, confidence: float) -> StageComparison:
    change = interval(pair.new.over(pair.base), confidence)
    verdict: Verdict = "slower" if change.low > limit else "undecided" if change.high > limit else "ok"
    base, new = (float(np.exp(side.log_median)) for side in (pair.base, pair.new))
    return StageComparison(
        pair.point, pair.stage, pair.baseline, base, new, change, limit * change.ratio / change.low, verdict
    )


def _require_same_setting(base: Document, new: Document) -> None:
    if new.verified is False:
        raise IncomparableInputs("verified = false in new: times of a wrong result say nothing")
    pairs = {
        "command": (base.command, new.command),
        "device.name": (base.device.name, new.device.name),
        "device.architecture": (base.device.architecture, new.device.architecture),
        "fabric": (base.fabric, new.fabric),
        "route": (base.route, new.route),
    }
    ours, theirs = base.geometry or {}, new.geometry or {}
    pairs |= {f"geometry.{key}": (ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs.keys())}
    for field, (in_base, in_new) in pairs.items():
        if in_base != in_new:
            raise IncomparableInputs(f"{field}: {in_base!r} in base, {in_new!r} in new; must be equal")


def _pairs(base: Mapping[str, Point], new: Mapping[str, Point], notes: list[str]) -> Iterator[_Pair]:
    for name, old_point in base.items():
        if name not in new:
            raise IncomparableInputs(f"points: {name} is missing in new")
        new_point = new[name]
        for stage, old_times in old_point.stages.items():
            if old_times.p50_us is None:
                continue
            new_times = new_point.stages.get(stage)
            if new_times is None or new_times.p50_us is None:
                raise IncomparableInputs(f"points: {name}: stages.{stage} has no times in new")
            baseline = _baseline(stage, old_point, new_point)
            if baseline is None:
                notes.append(f"{name}: {stage} has no baseline in both documents: absolute times")
            if not (old_times.rounds_us and new_times.rounds_us):
                notes.append(f"{name}: {stage} has no rounds_us: interval from percentiles, as if independent")
            where = f"{name}: {stage}"
            yield _Pair(
                name,
                stage,
                baseline,
                _estimate(old_times, _baselines(old_point).get(baseline), f"base: {where}"),
                _estimate(new_times, _baselines(new_point).get(baseline), f"new: {where}"),
            )


def _baselines(point: Point) -> dict[str | None, Statistics]:
    """Everything of a point that was timed beside the stages, by a name that tells peers and floors apart."""
    timed: dict[str | None, Statistics] = {
        f"peer {peer.name}": peer for peer in point.peers if not peer.skipped and peer.p50_us is not None
    }
    return timed | {f"floor {name}": floor for name, floor in point.floors.items() if floor.p50_us is not None}


def _baseline(stage: str, base: Point, new: Point) -> str | None:
    """The name of what a stage is divided by: timed in both documents, or None."""
    common = [name for name in _baselines(base) if name in _baselines(new) and name is not None]
    peers = sorted((name for name in common if name.startswith("peer ")), key=lambda name: "triton" not in name.lower())
    launch = [LAUNCH_FLOOR] if LAUNCH_FLOOR in common else []
    wanted = peers[:1] + launch if stage in PEER_STAGES else launch + peers[:1]
    return wanted[0] if wanted else None


def _estimate(times: Statistics, baseline: Statistics | None, where: str) -> Estimate:
    rounds = times.rounds_us
    if baseline is None:
        return estimate_rounds(_enough(rounds, where)) if rounds else _from_percentiles(times, where)
    if rounds and baseline.rounds_us:
        if len(rounds) != len(baseline.rounds_us):
            raise IncomparableInputs(
                f"{where}: rounds_us has {len(rounds)} rounds, its baseline {len(baseline.rounds_us)}; must be equal"
            )
        return estimate_rounds(np.divide(_enough(rounds, where), baseline.rounds_us))
    return _from_percentiles(times, where).over(_from_percentiles(baseline, f"{where}: baseline"))


def _enough(rounds: tuple[float, ...], where: str) -> tuple[float, ...]:
    if len(rounds) < LEAST_ROUNDS:
        raise IncomparableInputs(f"{where}: rounds_us has {len(rounds)} rounds; at least {LEAST_ROUNDS} are needed")
    return rounds


def _from_percentiles(times: Statistics, where: str) -> Estimate:
    p50, p95, samples = times.p50_us, times.p95_us, times.samples
    if p50 is None or p95 is None or samples is None or samples < LEAST_ROUNDS:
        raise IncomparableInputs(
            f"{where}: without rounds_us it needs p50_us, p95_us and at least {LEAST_ROUNDS} samples, "
            f"but has {p50}, {p95}, {samples}"
        )
    return estimate_percentiles(p50, p95, samples)
