"""The checkpoint on one GPU (modes solo and loopback): point by point, gate, interleaved timing, gate.

for every point:   inputs -> gate -> peers chosen and checked -> [ all subjects, interleaved ] -> gate, same bits
for swept points:  every kernel variant through the same gate, the sparse decode alone interleaved

On one H200 (`results/checkpoint-h200-20261130.json`): 40 points and the sweep in 86 s; `--quick` 21 s, kernels compiled
in it; loopback, quick, 12 s. With a mailbox for each of 24 layers, 37 MB, the merge took 1.89 us instead of 1.50: so a
graph's mailboxes may fill a third of L2. Run with stand-ins only so far: a whole checkpoint of route local, a failing
point.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dcp_decode import oracle
from dcp_decode.checkpoint import floors, peer_timing, summary
from dcp_decode.checkpoint.gate import Gate, Passed
from dcp_decode.checkpoint.inputs import KeyCaches, L2Eviction, Problem
from dcp_decode.checkpoint.peers import ALL_PEERS, QUICK_PEERS, Peer, PeerSkipped
from dcp_decode.checkpoint.points import Point, geometry_of, own_shape, plan_points
from dcp_decode.checkpoint.progress import ShowPoint
from dcp_decode.checkpoint.ranks import SOLO_RANK, USED_GENERATIONS, BenchRanks, region_bytes_in_use
from dcp_decode.checkpoint.slowdown import slowed
from dcp_decode.checkpoint.timing import Series, Stopwatch, Subject
from dcp_decode.checkpoint.variants import best_layout, default_config, swept_variants, timed_alone, variant_name
from dcp_decode.checkpoint.wire import SOURCE, wire_of
from dcp_decode.config import RunConfig
from dcp_decode.environment import describe_device
from dcp_decode.errors import WrongResult
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.aot import architecture_of
from dcp_decode.kernels.chain_config import chain_config
from dcp_decode.kernels.sparse_layout import DecodeConfig

LEAST_COPIES = 3
SWEEP_SAMPLES = 25
TUNING_SAMPLES = 7
L2_SHARE = 1 / 3  # of L2 that the mailboxes of a graph may take, so that words and hot keys stay there
STEP_ALLOWANCE = 1.05  # a verify step in one graph against its layers


@dataclass(frozen=True)
class Measurements:
    """What a checkpoint brings. passed: the gate that was closest to its bound. keys: of the document.

    wrong: the first gate that was not passed, if any.
    """

    passed: Passed
    family: str
    keys: dict[str, Any]
    wrong: WrongResult | None = None


class Checkpoint:
    """All points of a config on the current GPU. What does not pass its gate is left out, and named in `failures`.

    slowdown: every stage takes that share of its own time longer; proves that a regression gate can fail.
    """

    def __init__(self, config: RunConfig, quick: bool, slowdown: float = 0.0) -> None:
        self.config, self.quick, self.slowdown = config, quick, slowdown
        self.mode = config.checkpoint.mode
        self.push = config.parallel.route == "push"
        self.samples = config.checkpoint.samples
        self.seed = config.workload.seed
        self.peers: Sequence[Peer] = QUICK_PEERS if quick else ALL_PEERS
        if self.mode != "solo":
            self.peers = ()  # a peer attends with one rank's keys
        self.architecture = architecture_of(torch.device("cuda"))
        self.caches = KeyCaches(
            max(config.model.layers, USED_GENERATIONS * LEAST_COPIES), config.cache.k_scale, self.seed
        )
        self.eviction = L2Eviction()
        self.points: list[dict[str, Any]] = []
        self.sweep: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.passed: list[Passed] = []
        self.failures: list[WrongResult] = []

    def run(self, on_progress: ShowPoint) -> Measurements:
        """Measure all points. Raises WrongResult if not one gate was passed, WaitFailed if a mailbox wait expired."""
        planned = plan_points(self.config, self.quick)
        self.platform = floors.measure_platform(self.eviction)
        clocks = [describe_device("cuda")["clocks"]]
        for done, point in enumerate(planned):
            try:
                entry = _PointRun(self, point).measure()
            except WrongResult as error:  # fails the checkpoint; what other points show is kept
                self.note(error)
                on_progress(done + 1, len(planned), f"WRONG {error}")
            else:
                self.points.append(entry)
                on_progress(done + 1, len(planned), _line(entry))
            gc.collect()
            torch.cuda.empty_cache()
        if not self.passed:
            raise self.failures[0]
        clocks.append(describe_device("cuda")["clocks"])
        geometry = geometry_of(self.config, own_shape(self.config))
        worst = max(self.passed, key=lambda one: one.share)
        keys = {
            "points": self.points,
            "failures": [str(failure) for failure in self.failures],
            "profile": "quick" if self.quick else "full",
            "mode": self.mode,
            "step": self.steps,
            "sweep": self.sweep,
            "layout": best_layout(self.sweep),
            "platform": floors.describe_platform(self.platform) | {"clocks": clocks},
            "peer_facts": [asdict(peer.facts) for peer in self.peers],
            "wire": asdict(wire_of(geometry, own_shape(self.config).batch)) | {"source": SOURCE},
        }
        family = default_config(geometry, own_shape(self.config), self.push, self.architecture).family
        return Measurements(worst, family, keys, next(iter(self.failures), None))

    def note(self, failure: WrongResult) -> None:
        """Fail the checkpoint. The failure's frames, with the memory of its point, go."""
        self.failures.append(failure.with_traceback(None))

    def layers_of(self, geometry: Geometry, batch: int, ranks: int) -> int:
        """Layers of a chain's graph: the model's, or as many whose mailboxes leave L2 room for the keys."""
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        fitting = int(l2 * L2_SHARE) // (region_bytes_in_use(geometry, batch) * ranks)
        wanted = -(-self.config.model.layers // USED_GENERATIONS)
        return USED_GENERATIONS * max(LEAST_COPIES, min(wanted, fitting))


class _PointRun:
    """One point: its inputs and everything that is timed there."""

    def __init__(self, checkpoint: Checkpoint, point: Point) -> None:
        self.checkpoint, self.point = checkpoint, point
        shape = point.shape
        self.geometry = geometry_of(checkpoint.config, shape)
        running = (SOLO_RANK % self.geometry.dcp,) if checkpoint.mode == "solo" else tuple(range(self.geometry.dcp))
        layers = checkpoint.layers_of(self.geometry, shape.batch, len(running))
        seed = checkpoint.seed
        problem = Problem(self.geometry, shape, point.l2, len(running), layers, checkpoint.caches, seed)
        self.ranks = BenchRanks(problem, running, checkpoint.eviction)
        self.gate = Gate(self.ranks)
        self.stopwatch = Stopwatch(layers)
        self.config = default_config(self.geometry, shape, checkpoint.push, checkpoint.architecture)
        self._fused_config = chain_config(self.geometry, shape.batch, shape.keys).sparse
        self.allowed_error = 0.0  # of a peer: what we allow ourselves, the largest derived bound of the sparse decode

    def measure(self) -> dict[str, Any]:
        """The point's entry of the document."""
        checkpoint, label = self.checkpoint, f"{self.point.shape}, {self.point.l2}"
        stages = self.ranks.subjects(self.config)
        before = self._pass_gate(stages, label)
        self.allowed_error = before["sparse_decode"].largest_bound
        fused = self._fused(label)
        timed, skipped = self._peers()
        measured = slowed([*stages, *fused], checkpoint.slowdown, self.stopwatch) + [one.subject for one in timed]
        floor_subjects = floors.floor_subjects(self.ranks, self.config)
        gather = floors.fastest_gather(self.ranks, self.stopwatch, TUNING_SAMPLES)
        floor_subjects += [gather] if gather is not None else []
        series = self.stopwatch.measure([*measured, *floor_subjects], checkpoint.samples, checkpoint.seed)
        self.ranks.require_no_expired_wait(f"{label}, while timing")
        _require_same_bits(before, self._pass_gate(stages, f"{label}, after the timing"), label)
        stages += [subject for subject, passed in fused.items() if self._passes_again(subject, passed, label)]
        peers = [self._peer_entry(one, series[one.subject.name]) for one in timed] + skipped
        checkpoint.passed.append(before["chain"])
        if self.point.sweep:
            self._sweep()
        if self.stopwatch.layers == checkpoint.config.model.layers:
            names = [subject.name for subject in stages]
            checkpoint.steps += [self._step(name, series[name]) for name in summary.CHAINS if name in names]
        launch = series["launch"].p50
        shape = self.point.shape
        return {
            "batch": shape.batch,
            "heads": shape.heads,
            "keys": shape.keys,
            "l2": self.point.l2,
            "mode": checkpoint.mode,
            "variant": variant_name(self.config),
            "variant_alone": variant_name(timed_alone(self.config)),
            "stages": {subject.name: self._statistics(series[subject.name]) for subject in stages},
            "peers": peers,
            "floors": {subject.name: self._statistics(series[subject.name]) for subject in floor_subjects}
            | floors.modelled_floors(self.geometry, shape, self.point.l2, checkpoint.platform, launch),
        }

    def _pass_gate(self, stages: Sequence[Subject], label: str) -> dict[str, Passed]:
        """What each of the stages that leaves rows passed with."""
        checks = {"sparse_decode": self.gate.check_sparse, "chain": self.gate.check_chain}
        return {
            subject.name: checks[subject.name](subject, self.config, f"{label}, {subject.name}")
            for subject in stages
            if subject.name in checks
        }

    def _fused(self, label: str) -> dict[Subject, Passed]:
        """The fused chain, if it is asked for, not refused here and passes its gate, with what it passes with."""
        wanted = self.checkpoint.config.checkpoint.fused_chain and self.config.push
        fused = self.ranks.fused_subject() if wanted else None
        if fused is None:
            return {}
        passed = self._attempt(self.gate.check_chain, fused, self._fused_config, f"{label}, {fused.name}")
        return {} if passed is None else {fused: passed}

    def _passes_again(self, chain: Subject, before: Passed, label: str) -> bool:
        """Whether an alternative chain passes after the timing too, with the same bits; the checkpoint fails if not."""

        def check(subject: Subject, config: DecodeConfig, where: str) -> Passed:
            after = self.gate.check_chain(subject, config, where)
            _require_same_bits({subject.name: before}, {subject.name: after}, label)
            return after

        where = f"{label}, {chain.name}, after the timing"
        return self._attempt(check, chain, self._fused_config, where) is not None

    def _peers(self) -> tuple[list[peer_timing.TimedPeer], list[dict[str, Any]]]:
        """Those that are timed, and the entries of those that are not."""
        timed, skipped = [], []
        for peer in self.checkpoint.peers if self.point.compared else ():
            try:
                timed.append(
                    peer_timing.choose(
                        peer, self.ranks, self.stopwatch, self.gate.layers, self._expected, self.allowed_error
                    )
                )
            except PeerSkipped as reason:
                skipped.append(peer_timing.skipped_entry(peer, str(reason)))
        return timed, skipped

    def _peer_entry(self, timed: peer_timing.TimedPeer, series: Series) -> dict[str, Any]:
        """Of a timed peer, if its rows are still right after the timing."""
        try:
            peer_timing.check(timed.peer, timed.candidate, self.gate.layers, self._expected, self.allowed_error)
        except PeerSkipped as reason:
            return peer_timing.skipped_entry(timed.peer, f"after the timing: {reason}")
        return peer_timing.entry_of(timed, series, self._rounds(series))

    def _expected(self, layer: int) -> oracle.Partial:
        """Of the first measuring rank."""
        return self.gate.partial(layer, 0, self.config.family)

    def _sweep(self) -> None:
        """Every variant's sparse decode, each behind the gate before and after; one that fails there is left out."""
        label = f"{self.point.shape}, {self.point.l2}"
        variants = {
            variant_name(config): config
            for config in swept_variants(self.config, self.checkpoint.architecture, self.point.shape.keys)
        }
        subjects = [
            Subject(name, self.ranks.stages(config)["sparse_decode"], self.ranks.prepare_alone, self.ranks.copies)
            for name, config in variants.items()
        ]

        def pass_gate(when: str) -> dict[str, Passed]:
            tried = {
                one.name: self._attempt(self.gate.check_sparse, one, variants[one.name], f"{label}, {one.name}{when}")
                for one in subjects
            }
            return {name: passed for name, passed in tried.items() if passed is not None}

        before = pass_gate("")
        subjects = [subject for subject in subjects if subject.name in before]
        series = self.stopwatch.measure(subjects, SWEEP_SAMPLES, self.checkpoint.seed)
        self.ranks.require_no_expired_wait(f"{label}, while timing variants")
        after = pass_gate(", after the timing")
        _require_same_bits({name: before[name] for name in after}, after, label)
        shape = self.point.shape
        self.checkpoint.sweep += [
            {
                "batch": shape.batch,
                "heads": shape.heads,
                "keys": shape.keys,
                "l2": self.point.l2,
                "variant": name,
                "default": config == self.config,
                "pdl": config.pdl,
                **series[name].statistics(),
            }
            for name, config in variants.items()
            if name in after
        ]

    def _attempt(
        self, check: Callable[[Subject, DecodeConfig, str], Passed], subject: Subject, config: DecodeConfig, label: str
    ) -> Passed | None:
        """What an alternative passes its gate with; None, and the checkpoint fails, if it does not."""
        try:
            return check(subject, config, label)
        except WrongResult as error:
            self.checkpoint.note(error)
            return None

    def _step(self, stage: str, chain: Series) -> dict[str, Any]:
        """All the model's layers in one graph, its launch included, against as many times a layer."""
        shape, layers = self.point.shape, self.stopwatch.layers
        statistics = replace(chain, layer=chain.step).statistics()
        allowed = STEP_ALLOWANCE * layers * chain.p50
        return {
            "batch": shape.batch,
            "heads": shape.heads,
            "keys": shape.keys,
            "l2": self.point.l2,
            "stage": stage,
            "layers": layers,
            **statistics,
            "layer_p50_us": chain.p50,
            "allowed_us": allowed,
            "within": statistics["p50_us"] <= allowed,
        }

    def _statistics(self, series: Series) -> dict[str, Any]:
        return series.statistics() | {"rounds_us": self._rounds(series)}

    def _rounds(self, series: Series) -> list[float]:
        """Kept where something is compared."""
        return series.rounds() if self.point.compared else []


def _require_same_bits(before: Mapping[str, Passed], after: Mapping[str, Passed], label: str) -> None:
    """Raises WrongResult, naming the first that left other rows after the timing than before."""
    for name, passed in before.items():
        if after[name].digest != passed.digest:
            raise WrongResult(f"{label}, {name}: other bits after the timing than before")


def _line(entry: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {stage['p50_us']:.2f}" for name, stage in entry["stages"].items())
    return f"{entry['batch']} x {entry['keys']}, {entry['heads']} heads, {entry['l2']}: {times} us"
