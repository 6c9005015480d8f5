"""The main job on one rank: serve the requests of a trace as verify steps, and check them.

    agree -> open fabric, arm -> needle -> [ plan -> prefill -> layers -> verify -> complete ] ... -> gather

Every rank plans for itself (`service.py` is replicated); ranks meet only in the mailboxes, and in a control-plane
barrier after host work of unbounded length (prefill, verification), so that a mailbox deadline measures the exchange.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dcp_decode.cache import FlatCache, PagePool
from dcp_decode.config import RunConfig
from dcp_decode.control.plane import ControlPlane
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.device_rank import DeviceGroup, step_batches
from dcp_decode.device_steps import AS_PLACED, DeviceSteps, StepPolicy, StepStatistics
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.fabric.memory import Fabric
from dcp_decode.fabric.placement import Placement, open_fabric, place
from dcp_decode.forensics.black_box import black_box
from dcp_decode.host_memory import lack_of_memory, memory_bytes
from dcp_decode.kernels.fingerprint import source_hash
from dcp_decode.mailbox import Mailbox, MailboxLayout
from dcp_decode.service import Service, ServiceSettings, StepPlan
from dcp_decode.step import TIMED, Batch, BeforeStage, LayerResult, LayerRun, RankState, verify_layer
from dcp_decode.summary import RankSummary, RunSummary, account, account_step, execution_of, run_digest, spread
from dcp_decode.topk import check_row_range
from dcp_decode.trace import TraceRequest, read_trace, synthetic_requests
from dcp_decode.verification import Verifier, WorstRow, check_needle_group
from dcp_decode.waits import WaitTotal
from dcp_decode.workload import Workload

TIMED_REPLAYS = 20  # of the last step, after a run on a GPU: its stages' times
CPU_CLOCK = "wall time of every step's stages, waits for peers included"


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step, for whoever shows it.

    step_seconds: wall time of the step's layers. stage_seconds: (rank, a time for each of `step.TIMED`) of each layer
    and local rank, if the step ran stage by stage on the CPU. waits: of the local ranks so far, on the CPU.
    """

    requests: dict[str, int]
    steps: int
    tokens: int
    worst: WorstRow
    free_pages: int
    step_seconds: float
    stage_seconds: list[tuple[int, tuple[float, ...]]]
    waits: list[WaitTotal]


def run_rank(
    config: RunConfig,
    control: ControlPlane,
    on_progress: Callable[[Progress], None] | None = None,
    before_stage: BeforeStage | None = None,
    policy: StepPolicy = AS_PLACED,
) -> RunSummary:
    """Everything one process does in a run; collective over the control plane.

    on_progress: called after every step. before_stage: fault injection, see `step.verify_layer`. policy: how steps may
    run on a GPU. Raises ConfigError or UnsupportedEnvironment (nothing ran), WrongResult, MailboxTimeout, RankDied or
    ControlTimeout.
    """
    torch.set_num_threads(1)  # eight ranks share a machine, and one thread gives the same bits everywhere
    agree(control, "config", config.model_dump(mode="json") | {"kernel sources": source_hash()})
    requests = _requests(config)
    agree(control, "trace", {"requests": [repr(request) for request in requests]})
    parallel = config.parallel
    placement = place(parallel.fabric, parallel.device, control, compiles=parallel.kernels is None)
    if parallel.chain == "fused" and placement.device.type == "cpu":
        raise UnsupportedEnvironment(
            f"parallel.chain = 'fused': needs a GPU, but the ranks run on CPUs ({placement.reason})"
        )
    with _opened(placement, config.parallel.dcp, control) as fabric:
        run = Run(config, control, fabric, placement, requests, before_stage, policy)
        return run.complete(on_progress)


def agree(control: ControlPlane, what: str, values: dict) -> None:
    """Refuse, on every rank alike, if a value differs between ranks: names the key, the values and their ranks."""
    everyone = control.all_gather(_flatten(values), f"agreement on {what}")
    for key in sorted(set().union(*everyone)):
        given = [ours.get(key) for ours in everyone]
        if any(value != given[0] for value in given):
            other = next(rank for rank, value in enumerate(given) if value != given[0])
            raise ConfigError(key, given[other], f"on rank {other} must equal rank 0's {given[0]!r}")


def _flatten(values: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _requests(config: RunConfig) -> list[TraceRequest]:
    workload = config.workload
    if workload.synthetic is not None:
        synthetic = workload.synthetic
        count = min(synthetic.requests, workload.requests)
        return synthetic_requests(
            count, synthetic.input_length, synthetic.output_length, synthetic.interval_milliseconds
        )
    assert workload.trace is not None  # load_config gives one of the two
    return list(read_trace(workload.trace, workload.requests))


@contextlib.contextmanager
def _opened(placement: Placement, size: int, control: ControlPlane) -> Iterator[Fabric]:
    fabric = open_fabric(placement, size, control)
    try:
        yield fabric
    except BaseException:
        fabric.abandon()
        raise
    black_box.forget()
    fabric.close()


class Run:
    """State of a run in one process: its local ranks, the replicated service, and what was measured."""

    def __init__(
        self,
        config: RunConfig,
        control: ControlPlane,
        fabric: Fabric,
        placement: Placement,
        requests: list[TraceRequest],
        before_stage: BeforeStage | None,
        policy: StepPolicy,
    ) -> None:
        self.config = config
        self.control = control
        self.fabric = fabric
        self.before_stage = before_stage
        self.geometry = config.geometry()
        self.layers = config.model.layers
        self.workload = Workload(config.workload.seed, self.geometry)
        self.verifier = Verifier(self.geometry, self.workload, placement.device)
        self.checked_steps = 0
        self.families: set[str] = set()  # of the steps' sparse decodes
        self.step_seconds = 0.0
        self.placement = placement
        self.policy = policy
        self.stage_clock = CPU_CLOCK
        self.statistics: StepStatistics | None = None
        self.ranks: list[RankState] = []
        self.device_steps: DeviceSteps | None = None
        self._check_pages()
        if placement.device.type == "cuda":
            self.device_steps = self._open_device_steps()
        else:
            self.ranks = self._cpu_ranks()
        self.control.barrier("mailboxes armed")
        self.summaries = [
            RankSummary(rank, np.zeros(self.geometry.topk + 1, dtype=np.int64)) for rank in fabric.local_ranks
        ]
        settings = ServiceSettings(
            draft_tokens=config.service.draft_tokens,
            acceptance=config.service.acceptance,
            step_milliseconds=config.service.step_milliseconds,
            seed=config.workload.seed,
            max_steps=config.service.max_steps,
            max_running=config.service.max_running,
        )
        self.service = Service(requests, settings, self.geometry, PagePool(config.cache.pages))

    def complete(self, on_progress: Callable[[Progress], None] | None) -> RunSummary:
        """Drain the service (or stop at max_steps), then gather what all ranks measured."""
        if self.config.verify.mode != "off":
            black_box.at("needle test")
            self._check_needle()
            self.control.barrier("needle test")
        while (plan := self.service.next_step()) is not None:
            self._step(plan)
            if on_progress is not None:
                on_progress(self._progress())
        if self.device_steps is not None:
            self.statistics = self.device_steps.finish()
            self._measure_stages(self.device_steps)
        return self._gather()

    def _check_pages(self) -> None:
        pages = self.config.cache.pages
        if not check_row_range(pages + 1, self.geometry):  # a GPU's cache has a spare page
            raise ConfigError(
                "cache.pages",
                pages,
                "pages * page_stride_rows flat rows must be numbered in 31 bits; fewer are allowed",
            )

    def _mailboxes(self) -> list[Mailbox]:
        layout = MailboxLayout(self.geometry)
        mailboxes = [Mailbox(layout, memory) for memory in self.fabric.allocate(layout.nbytes)]
        for mailbox in mailboxes:
            mailbox.arm()
        black_box.watch(mailboxes)
        return mailboxes

    def _check_memory(self) -> None:
        """Refuse caches and mailboxes that this host's ranks can't hold: whoever takes more than there is is killed."""
        host = self.control.peers[self.control.rank].hostname
        processes = sum(peer.hostname == host for peer in self.control.peers)
        ranks = processes * len(self.fabric.local_ranks)
        if lack := lack_of_memory(self.config, ranks, host, memory_bytes()):
            raise UnsupportedEnvironment(lack)

    def _cpu_ranks(self) -> list[RankState]:
        self._check_memory()
        deadline = self.config.mailbox.deadline_seconds
        return [
            RankState(
                self.geometry,
                self.workload,
                FlatCache(self.layers, self.config.cache.pages, self.geometry),
                CpuStages(mailbox, deadline, self.control.dead_peers),
            )
            for mailbox in self._mailboxes()
        ]

    def _open_device_steps(self) -> DeviceSteps:
        # Imported here: a run on CPUs needs nothing of them, and compilation needs cutlass.
        from dcp_decode.kernels.aot import open_kernels
        from dcp_decode.kernels.fusing import agree_on_fused
        from dcp_decode.kernels.stages import GpuStages

        parallel, deadline = self.config.parallel, self.config.mailbox.deadline_seconds
        device = self.placement.device
        batches = step_batches(self.config.service.draft_tokens + 1, self.geometry)
        push = parallel.route == "push"
        load_kernel = open_kernels(parallel.kernels, self.geometry, push, batches, device)
        own_device = len(self.fabric.local_ranks) == 1 and not self.placement.shared
        fused = agree_on_fused(parallel.chain, batches, self.geometry, push, own_device, device, self.control)
        stages = [GpuStages(mailbox, deadline, push, load_kernel, fused.batches) for mailbox in self._mailboxes()]
        torch.cuda.synchronize(device)  # armed, before the barrier that lets peers push
        policy = self.policy if parallel.execution == "graph" else replace(self.policy, graphs=False)
        steps = DeviceSteps(
            DeviceGroup(self.geometry, self.workload, self.layers, self.config.cache.pages, stages),
            parallel.route,
            self.config.service.draft_tokens + 1,
            self.control,
            self.placement.shared,
            deadline,
            policy,
            self.before_stage,
        )
        steps.statistics.notes.append(fused.note)
        return steps

    def _check_needle(self) -> None:
        route, seed = self.config.parallel.route, self.config.workload.seed
        if self.device_steps is None:
            check_needle_group([state.stages for state in self.ranks], self.geometry, route, seed)
        else:
            self.device_steps.check_needle(seed)

    def _step(self, plan: StepPlan) -> None:
        black_box.at("prefill", plan.index)
        for index in plan.prefills:
            self._prefill(index)
        if plan.prefills:
            self.control.barrier(f"prefill of step {plan.index}")
        batch = Batch(plan.rows, {row.request: self.service.request(row.request) for row in plan.rows})
        checked = self._is_checked(plan.index)
        black_box.at("layers", plan.index)
        layers = self._run_layers(plan.index, batch, checked)
        black_box.at("verification", plan.index)
        if checked:
            ranks = len(self.summaries)
            for first in range(0, len(layers), ranks):
                self.verifier.check(plan.index, layers[first : first + ranks])
            self.checked_steps += 1
            self.verifier.forget()
            if self.device_steps is not None:
                self.device_steps.release_cache()
            self.control.barrier(f"verification of step {plan.index}")
        self.service.complete(plan)

    def _prefill(self, index: int) -> None:
        request = self.service.request(index)
        if self.device_steps is not None:
            self.device_steps.prefill(request)
            return
        for layer in range(self.layers):
            for state in self.ranks:
                state.prefill(layer, request)

    def _run_layers(self, step: int, batch: Batch, checked: bool) -> Sequence[LayerRun[Batch] | LayerResult]:
        """All layers of a step, each of all local ranks, accounted for; on a GPU returned only if checked."""
        started = time.perf_counter()
        if self.device_steps is not None:
            result = self.device_steps.run(step, batch, checked)
            self.step_seconds = time.perf_counter() - started
            self.families.add(result.family)
            account_step(self.summaries, result)
            return result.results
        before_stage = black_box.noting(step, self.before_stage)
        runs: list[LayerRun[Batch]] = []
        for layer in range(self.layers):
            runs += verify_layer(self.ranks, layer, batch, self.config.parallel.route, before_stage)
        self.step_seconds = time.perf_counter() - started
        self.families.add(runs[0].family)
        for number, run in enumerate(runs):
            account(self.summaries[number % len(self.summaries)], run)
        return runs

    def _measure_stages(self, device_steps: DeviceSteps) -> None:
        times = device_steps.measure_stages(TIMED_REPLAYS)
        if times is None:
            self.stage_clock = "none: no step ran, no graph may (eager), ranks share the GPU, or stages are intercepted"
            return
        self.stage_clock = times.clock
        for rank, seconds in times.seconds:
            self.summaries[self.fabric.local_ranks.index(rank)].seconds.append(seconds)

    def _is_checked(self, step: int) -> bool:
        verify = self.config.verify
        return verify.mode == "every" or (verify.mode == "sample" and step % verify.period == 0)

    def _progress(self) -> Progress:
        timed = 0 if self.device_steps is not None else self.layers
        return Progress(
            requests=self.service.counts(),
            steps=self.service.steps,
            tokens=self.service.tokens,
            worst=self.verifier.worst,
            free_pages=self.service.pool.free,
            step_seconds=self.step_seconds,
            stage_seconds=[
                (one.rank, times) for one in self.summaries for times in one.seconds[len(one.seconds) - timed :]
            ],
            waits=[total for state in self.ranks for total in state.stages.arrival.totals.values()],
        )

    def _gather(self) -> RunSummary:
        agree(self.control, "the schedule", {"service state": self.service.fingerprint()})
        everyone = self.control.all_gather((self.summaries, self.verifier.worst, self.statistics), "summaries")
        summaries = sorted((one for many, _, _ in everyone for one in many), key=lambda summary: summary.rank)
        seconds = np.array([summary.seconds for summary in summaries]).reshape(len(summaries), -1, len(TIMED))
        slowest = seconds.max(axis=0)  # (iterations, stages)
        keys = np.repeat(np.arange(self.geometry.topk + 1), sum(summary.keys for summary in summaries))
        return RunSummary(
            fabric=self.fabric.name,
            fabric_reason=self.placement.reason,
            family=", ".join(sorted(self.families)) or "none",
            device=str(self.fabric.device),
            requests=self.service.counts(),
            refusals=list(self.service.refusals.values()),
            steps=self.service.steps,
            tokens=self.service.tokens,
            acceptance=list(self.service.acceptance),
            verified=True if self.checked_steps else None,
            checked_steps=self.checked_steps,
            worst=max((worst for _, worst, _ in everyone), key=lambda worst: worst.share),
            digest=run_digest(summaries),
            keys_a_row=spread(keys) if keys.size else None,
            stage_seconds={name: slowest[:, column] for column, name in enumerate(TIMED)},
            stage_clock=self.stage_clock,
            execution=execution_of(self.config.parallel.execution, [one for _, _, one in everyone if one is not None]),
        )
