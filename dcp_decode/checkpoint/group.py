"""Mode group: real ranks, a GPU each, the exchange inside the timed region.

A round on every rank: control-plane barrier, then on the GPU one chain that isn't timed and the timed graph. That first
chain ends on no rank before all have pushed to it, so the timed graphs start within a wire's latency of each other.
The time of a round is the maximum over ranks, its skew the spread between the first and the last rank.

Every rank has its own keys and rows; queries come from one seed, so each rank knows all heads. For the gate the ranks
exchange the keys that a layer selects. NCCL moves the same bytes for comparison: an all-gather of the query bytes and
an all-to-all of the partial rows, each layer, in a graph.

Not run yet: it needs a GPU a rank. On one GPU its refusal has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from dcp_decode import numerics, oracle
from dcp_decode.checkpoint.gate import Passed, passed_by, passed_by_all
from dcp_decode.checkpoint.inputs import KeyCaches, L2Eviction, Problem
from dcp_decode.checkpoint.measure import Measurements
from dcp_decode.checkpoint.peers.nccl_exchange import NcclExchange
from dcp_decode.checkpoint.points import Point, geometry_of, own_shape, plan_points
from dcp_decode.checkpoint.progress import ShowPoint
from dcp_decode.checkpoint.ranks import current_stream
from dcp_decode.checkpoint.timing import Series, capture, graph_lengths, layer_series, replay, slowest_rank
from dcp_decode.checkpoint.variants import default_config, variant_name
from dcp_decode.checkpoint.wire import SOURCE, wire_of
from dcp_decode.config import RunConfig
from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import WrongResult
from dcp_decode.fabric.memory import Fabric
from dcp_decode.kernels.aot import architecture_of
from dcp_decode.kernels.configs import QueryConfig, ValueConfig
from dcp_decode.kernels.launch import run_query, run_sparse, run_value
from dcp_decode.kernels.query import compile_query
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.value import compile_value
from dcp_decode.mailbox import Mailbox, MailboxLayout
from dcp_decode.waits import MailboxTimeout, read_record

WARM_UP_ROUNDS = 3


class GroupCheckpoint:
    """One rank of a group; collective over the control plane, point by point."""

    def __init__(self, config: RunConfig, quick: bool, control: ControlPlane, fabric: Fabric) -> None:
        self.config, self.quick, self.control, self.fabric = config, quick, control, fabric
        self.layers = config.model.layers
        self.samples = config.checkpoint.samples
        self.seed = config.workload.seed
        self.caches = KeyCaches(self.layers, config.cache.k_scale, self.seed + 1 + control.rank)
        self.eviction = L2Eviction()
        self.stream = torch.cuda.Stream()
        self.nccl = NcclExchange(control)

    def run(self, on_progress: ShowPoint) -> Measurements:
        """Measure all points; the same result on every rank. Raises WrongResult or MailboxTimeout."""
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
            "peer_facts": [asdict(self.nccl.facts)],
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
        # One layer more than a graph has: the chain that aligns the ranks must not warm a timed layer's keys.
        layers = self.layers + 1
        problem = Problem(geometry, shape, point.l2, 1, layers, self.caches, self.seed, own_seed=1 + self.control.rank)
        chain = _Chain(problem, mailbox, int(self.config.mailbox.deadline_seconds * 1e9))
        label = f"{shape}, {point.l2}"
        before = self._pass_gate(chain, label)
        prepare = self.eviction.enqueue if point.l2 == "cold" else lambda: None
        series, skew = self._time(chain.launch, prepare, label)
        wait = read_record(mailbox)
        if wait is not None:
            raise MailboxTimeout([wait], self.config.mailbox.deadline_seconds)
        after = self._pass_gate(chain, f"{label}, after the timing")
        if after.digest != before.digest:
            raise WrongResult(f"{label}: the kernels left other bits after the timing than before")
        exchanged, _ = self._time(self.nccl.launcher(geometry, shape.batch), lambda: None, f"{label}, NCCL")
        entry = {
            "batch": shape.batch,
            "heads": shape.heads,
            "keys": shape.keys,
            "l2": point.l2,
            "mode": "group",
            "variant": variant_name(chain.config),
            "stages": {
                "chain": series.statistics() | {"rounds_us": [round(float(value), 3) for value in series.layer]},
                "rank_skew": skew.statistics(),
            },
            "peers": [self.nccl.entry(exchanged)],
            "floors": {"wire": {"p50_us": wire_of(geometry, shape.batch).layer_us}},
        }
        return entry, before

    def _time(self, launch: Callable[[int], None], prepare: Callable[[], None], label: str) -> tuple[Series, Series]:
        """Layer times, maximum over ranks per round, and their spread over ranks."""
        lengths = graph_lengths(self.layers)
        graphs = []
        for length in lengths:
            # Captured on every rank alike, so that the eager layers before a capture meet their peers.
            self.control.barrier(f"capture of {label}")
            graphs.append(capture(launch, length, self.stream))
        times = np.empty((2, self.samples))
        for sample in range(-WARM_UP_ROUNDS, self.samples):
            for which, graph in enumerate(graphs):
                self.control.barrier(f"round {sample} of {label}")

                def aligned() -> None:
                    prepare()
                    launch(self.layers)

                begin, end = replay(graph, aligned, self.stream)
                self.stream.synchronize()
                if sample >= 0:
                    times[which, sample] = begin.elapsed_time(end) * 1e3
        own = layer_series(times[0], times[1], lengths)
        layers = np.array(self.control.all_gather(own.layer, f"times of {label}"))
        steps = np.array(self.control.all_gather(own.step, f"step times of {label}"))
        slowest, spread = slowest_rank(layers)
        slowest_step, step_spread = slowest_rank(steps)
        return Series(slowest, slowest_step), Series(spread, step_spread)

    def _pass_gate(self, chain: _Chain, label: str) -> Passed:
        """One layer's merged rows of this rank's heads against the oracle over all ranks' keys."""
        problem, rank = chain.problem, self.control.rank
        geometry = problem.geometry
        chain.merged.view(torch.int16).fill_(-1)
        self.control.barrier(f"gate of {label}")
        chain.launch(0)
        torch.cuda.synchronize()
        selected = problem.part_of(problem.caches.e4m3, 0)[problem.indices_of(0).long()]
        everyone = self.control.all_gather(selected.cpu(), f"keys of {label}")
        heads = slice(rank * geometry.owner_heads, (rank + 1) * geometry.owner_heads)
        query = problem.query_bytes[:, heads]
        family = oracle.family_named(chain.config.family)
        parts = [oracle.source_partial(query, keys.cuda(), problem.valid, geometry, family) for keys in everyone]
        verdict = oracle.verify_merged(chain.merged, oracle.merge_partials(parts))
        verdict.require(f"{label}, rank {rank}")
        own = passed_by([verdict], [chain.merged])
        return passed_by_all(self.control.all_gather(own, f"verdicts of {label}"))


class _Chain:
    """This rank's three kernels on its mailbox: layer after layer, generations flip as in a model."""

    def __init__(self, problem: Problem, mailbox: Mailbox, deadline_nanoseconds: int) -> None:
        geometry, batch = problem.geometry, problem.shape.batch
        self.problem, self.mailbox, self.deadline = problem, mailbox, deadline_nanoseconds
        self.config = default_config(geometry, problem.shape, True, architecture_of(torch.device("cuda")))
        self.kernels = (
            compile_query(QueryConfig(geometry, batch)),
            compile_sparse(self.config),
            compile_value(ValueConfig(geometry, batch)),
        )
        first = mailbox.rank * geometry.owner_heads
        self.query = problem.query[:, first : first + geometry.owner_heads].contiguous()
        shape = (batch, geometry.owner_heads, numerics.LATENT_DIM)
        self.merged = torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    def launch(self, layer: int) -> None:
        """All three stages of layer i on the current stream."""
        query, sparse, value = self.kernels
        stream, problem = current_stream(), self.problem
        run_query(query, self.mailbox, self.query, stream)
        run_sparse(
            sparse, self.mailbox, problem.caches.e4m3, problem.rows_of(layer), problem.valid, None, None,
            self.deadline, stream,
        )  # fmt: skip
        run_value(value, self.mailbox, self.merged, self.deadline, stream)
