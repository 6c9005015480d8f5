"""Mode group: real ranks, a GPU each, the exchange inside the timed region.

A round on every rank: control-plane barrier, then on the GPU one chain that isn't timed and the timed graph. That first
chain ends on no rank before all have pushed to it, so the timed graphs start within a wire's latency of each other.
The time of a round is the maximum over ranks, its skew the spread between the first and the last rank.

Every rank has its own keys and rows; queries come from one seed, so each rank knows all heads. For the gate the ranks
exchange the keys that a layer selects. At every point, beside the chain:

    stages        the same chain with event nodes between its kernels, which then don't overlap: a stage lasts until all
                  that it has stored at its peers is acknowledged, and longer by an event node
    fused_chain   one launch a layer over the same mailboxes, where it is asked for and fits
    nccl_chain    the chain's kernels with NCCL between them, whose merged rows must have the chain's bits
    nccl          NCCL's exchange alone: an all-gather of the query bytes and an all-to-all of the partial rows
    solo_...      the same chains of this rank alone, with its peers' words in place: no wire in them
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from dcp_decode import oracle
from dcp_decode.checkpoint.gate import Passed, passed_by, passed_by_all
from dcp_decode.checkpoint.group_chains import (
    STAGES,
    ExchangeAlone,
    FusedChain,
    GroupChain,
    Layers,
    NcclChain,
    PushedChain,
)
from dcp_decode.checkpoint.inputs import KeyCaches, L2Eviction, Problem
from dcp_decode.checkpoint.measure import Measurements
from dcp_decode.checkpoint.peers.nccl_exchange import NcclExchange
from dcp_decode.checkpoint.points import Point, geometry_of, own_shape, plan_points
from dcp_decode.checkpoint.progress import ShowPoint
from dcp_decode.checkpoint.ranks import BenchRanks
from dcp_decode.checkpoint.stream_wait import await_stream
from dcp_decode.checkpoint.timing import (
    LEAD_CYCLES,
    Series,
    Stopwatch,
    capture,
    graph_lengths,
    layer_series,
    replay,
    slowest_rank,
)
from dcp_decode.checkpoint.variants import default_config, variant_name
from dcp_decode.checkpoint.wire import SOURCE, wire_of
from dcp_decode.config import RunConfig
from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import WrongResult
from dcp_decode.fabric.memory import Fabric
from dcp_decode.kernels.aot import architecture_of
from dcp_decode.mailbox import Mailbox, MailboxLayout
from dcp_decode.statistics import stage_statistics
from dcp_decode.waits import MailboxTimeout, read_record

WARM_UP_ROUNDS = 3
GROUP_LEAD_CYCLES = 3 * LEAD_CYCLES  # the host also enqueues the chain that aligns the ranks


class GroupCheckpoint:
    """One rank of a group; collective over the control plane, point by point."""

    def __init__(self, config: RunConfig, quick: bool, control: ControlPlane, fabric: Fabric) -> None:
        self.config, self.quick, self.control, self.fabric = config, quick, control, fabric
        self.layers = config.model.layers
        # Behind a graph's layers, so that the chain that aligns the ranks warms no timed keys; even, as a first use.
        self.aligning_layer = self.layers + self.layers % 2
        self.samples = config.checkpoint.samples
        self.seed = config.workload.seed
        self.deadline = int(config.mailbox.deadline_seconds * 1e9)
        self.caches = KeyCaches(self.layers, config.cache.k_scale, self.seed + 1 + control.rank)
        self.eviction = L2Eviction()
        self.stream = torch.cuda.Stream()
        self.nccl = NcclExchange(control)

    def run(self, on_progress: ShowPoint) -> Measurements:
        """Measure all points; the same result on every rank. Raises WrongResult or WaitFailed."""
        planned = plan_points(self.config, self.quick)
        points, passed = [], []
        for done, point in enumerate(planned):
            entry, gate = self._measure(point)
            points.append(entry)
            passed.append(gate)
            chain = entry["stages"]["chain"]["p50_us"]
            on_progress(done + 1, len(planned), f"{point.shape}, {point.l2}: chain {chain:.2f} us")
        torch.cuda.synchronize()
        self.nccl.close()
        geometry = geometry_of(self.config, own_shape(self.config))
        keys = {
            "points": points,
            "failures": [],
            "profile": "quick" if self.quick else "full",
            "mode": "group",
            "step": [],
            "sweep": [],
            "layout": [],
            "platform": {},
            "peer_facts": [asdict(self.nccl.facts), asdict(self.nccl.chain_facts)],
            "wire": asdict(wire_of(geometry, own_shape(self.config).batch)) | {"source": SOURCE},
        }
        worst = max(passed, key=lambda one: one.share)
        family = default_config(geometry, own_shape(self.config), True, architecture_of(torch.device("cuda"))).family
        return Measurements(worst, family, keys)

    def _measure(self, point: Point) -> tuple[dict[str, Any], Passed]:
        geometry, shape = geometry_of(self.config, point.shape), point.shape
        layout = MailboxLayout(geometry)
        mailbox = Mailbox(layout, self.fabric.allocate(layout.nbytes)[0])
        mailbox.arm()
        torch.cuda.synchronize()
        self.control.barrier(f"mailboxes of {shape} are armed")
        layers = self.aligning_layer + 1
        problem = Problem(geometry, shape, point.l2, 1, layers, self.caches, self.seed, own_seed=1 + self.control.rank)
        label = f"{shape}, {point.l2}"
        evict = self.eviction.enqueue if point.l2 == "cold" else lambda: None
        chain = PushedChain(problem, mailbox, self.deadline)
        before = self._pass_gate(chain, label)
        series, skew = self._time(chain, evict, label)
        stages, marks = self._time_stages(chain, evict, label)
        times = {chain.name: series, "rank_skew": skew}
        if self.config.checkpoint.fused_chain and FusedChain.fits(problem):
            fused = FusedChain(problem, mailbox, self.deadline)
            passed = self._pass_gate(fused, f"{label}, {fused.name}")
            times[fused.name], _ = self._time(fused, evict, f"{label}, {fused.name}")
            self._pass_again(fused, passed, f"{label}, {fused.name}")
        self._pass_again(chain, before, label)
        peers = self._time_nccl(chain, evict, label)
        entry = {
            "batch": shape.batch,
            "heads": shape.heads,
            "keys": shape.keys,
            "l2": point.l2,
            "mode": "group",
            "variant": variant_name(chain.config),
            "stages": stages
            | {name: series.statistics() | {"rounds_us": series.rounds()} for name, series in times.items()},
            "peers": peers,
            "floors": {
                "wire": {"p50_us": wire_of(geometry, shape.batch).layer_us},
                "event_node": marks,
                **self._time_solo(point, set(times)),
            },
        }
        return entry, before

    def _time_nccl(self, reference: PushedChain, evict: Callable[[], None], label: str) -> list[dict[str, Any]]:
        """Entries of NCCL: between the same kernels, and its exchange alone. reference: has left layer 0's rows."""
        problem, label = reference.problem, f"{label}, NCCL"
        chain = NcclChain(problem, self.control.rank, self.deadline, self.nccl)
        self._require_same_rows(chain, reference, label)
        by_nccl, _ = self._time(chain, evict, label)
        self._refuse_expired(chain)
        self._require_same_rows(chain, reference, f"{label}, after the timing")
        exchanged, _ = self._time(ExchangeAlone(problem, self.nccl), lambda: None, f"{label}'s exchange alone")
        return [self.nccl.chain_entry(by_nccl), self.nccl.entry(exchanged)]

    def _time(self, chain: Layers, evict: Callable[[], None], label: str) -> tuple[Series, Series]:
        """Layer times, maximum over ranks per round, and their spread over ranks. evict: before a replay."""
        lengths = graph_lengths(self.layers)
        graphs = []
        for length in lengths:
            # Captured on every rank alike, so that the eager layers before a capture meet their peers.
            self.control.barrier(f"capture of {label}")
            with torch.cuda.stream(self.stream):
                chain.rewind()
            first = partial(self._await, f"first layer of {label}")
            graphs.append(capture(chain.launch, length, self.stream, wait=first))
        times = np.empty((2, self.samples))
        for sample in range(-WARM_UP_ROUNDS, self.samples):
            for which, graph in enumerate(graphs):
                begin, end = self._replay(graph, chain, evict, f"round {sample} of {label}")
                if sample >= 0:
                    times[which, sample] = begin.elapsed_time(end) * 1e3
        own = layer_series(times[0], times[1], lengths)
        layers = np.array(self.control.all_gather(own.layer, f"times of {label}"))
        steps = np.array(self.control.all_gather(own.step, f"step times of {label}"))
        slowest, spread = slowest_rank(layers)
        slowest_step, step_spread = slowest_rank(steps)
        return Series(slowest, slowest_step), Series(spread, step_spread)

    def _replay(
        self, graph: torch.cuda.CUDAGraph, chain: Layers, evict: Callable[[], None], label: str
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """One replay on all ranks together, ended; the events around it."""
        self.control.barrier(label)

        def aligned() -> None:
            evict()
            chain.rewind()
            chain.launch(self.aligning_layer)
            chain.rewind()

        events = replay(graph, aligned, self.stream, GROUP_LEAD_CYCLES)
        self._await(label, self.stream)
        return events

    def _await(self, label: str, stream: torch.cuda.Stream) -> None:
        """Until this rank's GPU has done all that is enqueued on a stream. Raises RankDied or ControlTimeout."""
        await_stream(stream, self.control, self.config.mailbox.control_deadline_seconds, label)

    def _time_stages(
        self, chain: PushedChain, evict: Callable[[], None], label: str
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Of each stage, mean of the layers of a replay and maximum over ranks; and what an event node takes."""
        marks: list[torch.cuda.Event] = []

        def mark() -> None:
            event = torch.cuda.Event(enable_timing=True, external=True)
            event.record()
            marks.append(event)

        self.control.barrier(f"capture of {label}, stages")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            mark()
            mark()
            for layer in range(self.layers):
                chain.launch(layer, mark)
        times = np.empty((1 + len(STAGES), self.samples))
        for sample in range(-WARM_UP_ROUNDS, self.samples):
            self._replay(graph, chain, evict, f"round {sample} of {label}, stages")
            if sample >= 0:
                between = [begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(marks)]
                times[0, sample] = between[0]
                times[1:, sample] = np.reshape(between[1:], (self.layers, len(STAGES))).mean(0)
        slowest = np.array(self.control.all_gather(times, f"stage times of {label}")).max(0)
        empty, *stages = (stage_statistics(of * 1e-6) for of in slowest)
        return dict(zip(STAGES, stages, strict=True)), empty

    def _time_solo(self, point: Point, names: Collection[str]) -> dict[str, dict[str, float]]:
        """This rank's chains as mode solo times them, by solo_ + name; the slower of the ranks' in every round."""
        geometry, rank = geometry_of(self.config, point.shape), self.control.rank
        problem = Problem(geometry, point.shape, point.l2, 1, self.layers, self.caches, self.seed, own_seed=1 + rank)
        bench = BenchRanks(problem, (rank,), self.eviction)
        config = default_config(geometry, point.shape, True, architecture_of(problem.caches.device))
        subjects = [*bench.subjects(config), bench.fused_subject()]
        chains = [subject for subject in subjects if subject is not None and subject.name in names]
        own = Stopwatch(self.layers).measure(chains, self.samples, self.seed)
        label = f"{point.shape}, {point.l2}, solo"
        bench.require_no_expired_wait(f"{label}, while timing")
        ranks = self.control.all_gather({name: series.layer for name, series in own.items()}, f"times of {label}")
        slowest = {name: slowest_rank(np.array([times[name] for times in ranks]))[0] for name in own}
        return {f"solo_{name}": stage_statistics(times * 1e-6) for name, times in slowest.items()}

    def _refuse_expired(self, chain: GroupChain) -> None:
        wait = read_record(chain.mailbox)
        if wait is not None:
            raise MailboxTimeout([wait], self.config.mailbox.deadline_seconds)

    def _require_same_rows(self, chain: GroupChain, reference: GroupChain, label: str) -> None:
        """Raise WrongResult unless a chain's rows of layer 0 are those that the reference has just left; WaitFailed."""
        self.control.barrier(label)
        chain.merged.view(torch.int16).fill_(-1)
        chain.rewind()
        chain.launch(0)
        self._await(label, torch.cuda.current_stream())
        self._refuse_expired(chain)
        if not torch.equal(chain.merged.view(torch.int16), reference.merged.view(torch.int16)):
            raise WrongResult(f"{label}, rank {self.control.rank}: other bits than the chain over the mailboxes")

    def _pass_again(self, chain: GroupChain, before: Passed, label: str) -> None:
        """Raise MailboxTimeout or WrongResult unless all went well since, and the gate is passed with the same bits."""
        self._refuse_expired(chain)
        if self._pass_gate(chain, f"{label}, after the timing").digest != before.digest:
            raise WrongResult(f"{label}: the kernels left other bits after the timing than before")

    def _pass_gate(self, chain: GroupChain, label: str) -> Passed:
        """One layer's merged rows of this rank's heads against the oracle over all ranks' keys.

        Raises WrongResult or WaitFailed.
        """
        problem, rank = chain.problem, self.control.rank
        geometry = problem.geometry
        chain.merged.view(torch.int16).fill_(-1)
        self.control.barrier(f"gate of {label}")
        chain.launch(0)
        self._await(f"gate of {label}", torch.cuda.current_stream())
        self._refuse_expired(chain)
        selected = problem.part_of(problem.caches.e4m3, 0)[problem.indices_of(0).long()]
        everyone = self.control.all_gather(selected.cpu(), f"keys of {label}")
        heads = slice(rank * geometry.owner_heads, (rank + 1) * geometry.owner_heads)
        query = problem.query_bytes[:, heads]
        family = oracle.family_named(chain.family)
        parts = [oracle.source_partial(query, keys.cuda(), problem.valid, geometry, family) for keys in everyone]
        verdict = oracle.verify_merged(chain.merged, oracle.merge_partials(parts))
        verdict.require(f"{label}, rank {rank}")
        own = passed_by([verdict], [chain.merged])
        return passed_by_all(self.control.all_gather(own, f"verdicts of {label}"))
