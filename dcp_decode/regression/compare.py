"""Base and new measurement -> a verdict a stage of every point, and the gate's exit code.

    ratio = (new stage / new baseline) / (base stage / base baseline)

    slower      the whole interval lies above the limit: a regression
    undecided   the interval holds the limit: the noise hides whether it is one
    ok          the whole interval lies at or below the limit

The baseline is measured in the same run, round by round: the launch floor for the stages that only push or merge, a
peer (Triton's first) for the others. Base decides which, and new must have it too. Without one, absolute times are
compared, and a note says so. The confidence holds for all verdicts together (Bonferroni), so a long table raises no
more false alarms than a short one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dcp_decode.regression.documents import (
    Distribution,
    Document,
    IncomparableInputs,
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
LAUNCH_FLOOR = "floor:launch"
OWN_CODE = "peer:own"  # peers that share our kernels get slower with them
FLOOR_STAGES = frozenset({"query_push", "merge"})  # little more than their launch
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
    pairs = list(_pairs(base, new, notes))
    if not pairs:
        raise IncomparableInputs("neither points with rounds nor stages with times in base")
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
    for which, document in (("base", base), ("new", new)):
        if document.verified is False:
            raise IncomparableInputs(f"verified = false in {which}: times of a wrong result say nothing")
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


def _pairs(base: Document, new: Document, notes: list[str]) -> Iterator[_Pair]:
    if base.measured():
        return _pairs_of_rounds(_by_name(base, "base"), _by_name(new, "new"), notes)
    return _pairs_of_percentiles(base.stages or {}, new.stages or {}, notes)


def _by_name(document: Document, which: str) -> dict[str, Distribution]:
    named: dict[str, Distribution] = {}
    for entry in document.measured():
        if entry.name in named:
            raise IncomparableInputs(f"points: {entry.name} is there twice in {which}")
        named[entry.name] = entry
    return named


def _pairs_of_rounds(
    base: Mapping[str, Distribution], new: Mapping[str, Distribution], notes: list[str]
) -> Iterator[_Pair]:
    notes += [f"{name}: only in new" for name in new.keys() - base.keys()]
    for name, in_base in base.items():
        if name not in new:
            raise IncomparableInputs(f"points: {name} is missing in new")
        in_new = new[name]
        for stage in in_base.stages:
            if stage not in in_new.stages:
                raise IncomparableInputs(f"points: {name}: {stage} has no rounds in new")
            baseline = _baseline(stage, in_base)
            if baseline is None:
                notes.append(f"{name}: {stage} has no baseline: absolute times")
            elif baseline not in in_new.baselines:
                raise IncomparableInputs(f"points: {name}: {baseline}, the baseline of {stage}, has no rounds in new")
            old, latest = (
                estimate_rounds(_rounds(entry, stage, baseline, which))
                for entry, which in ((in_base, "base"), (in_new, "new"))
            )
            yield _Pair(name, stage, baseline, old, latest)


def _baseline(stage: str, base: Distribution) -> str | None:
    """The series that a stage is divided by; None if there is none."""
    peers = [name for name in base.baselines if name.startswith("peer:") and not name.startswith(OWN_CODE)]
    peers.sort(key=lambda name: "triton" not in name.lower())
    launch = [LAUNCH_FLOOR] if LAUNCH_FLOOR in base.baselines else []
    wanted = launch + peers[:1] if stage in FLOOR_STAGES else peers[:1] + launch
    return wanted[0] if wanted else None


def _rounds(entry: Distribution, stage: str, baseline: str | None, which: str) -> np.ndarray:
    """A stage's time over its baseline's, one a round."""
    rounds = entry.samples_us[stage]
    where = f"points: {entry.name}: {stage} in {which}"
    if len(rounds) < LEAST_ROUNDS:
        raise IncomparableInputs(f"{where} has {len(rounds)} rounds; at least {LEAST_ROUNDS} are needed")
    if baseline is None:
        return np.array(rounds)
    if len(rounds) != len(entry.samples_us[baseline]):
        raise IncomparableInputs(
            f"{where} has {len(rounds)} rounds, {baseline} {len(entry.samples_us[baseline])}; must be equal"
        )
    return np.divide(rounds, entry.samples_us[baseline])


def _pairs_of_percentiles(
    base: Mapping[str, Statistics], new: Mapping[str, Statistics], notes: list[str]
) -> Iterator[_Pair]:
    notes.append("no rounds in base: absolute times, and their error from percentiles as if independent")
    for stage, in_base in base.items():
        if in_base.p50_us is None:
            continue
        in_new = new.get(stage)
        if in_new is None or in_new.p50_us is None:
            raise IncomparableInputs(f"stages.{stage} has no times in new")
        estimates = (
            _from_percentiles(in_base, f"stages.{stage} in base"),
            _from_percentiles(in_new, f"stages.{stage} in new"),
        )
        yield _Pair("run", stage, None, *estimates)


def _from_percentiles(times: Statistics, where: str) -> Estimate:
    p50, p95, samples = times.p50_us, times.p95_us, times.samples
    if p50 is None or p95 is None or samples is None or samples < LEAST_ROUNDS:
        raise IncomparableInputs(
            f"{where} needs p50_us, p95_us and at least {LEAST_ROUNDS} samples, but has {p50}, {p95}, {samples}"
        )
    return estimate_percentiles(p50, p95, samples)
