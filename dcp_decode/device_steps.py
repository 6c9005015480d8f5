"""Runs verify steps on a device: one graph launch a step, and one wait for its results.

    shape new      eager: compile kernels, every rank's stage before any rank's next, with a barrier between processes
    second use     captured as a CUDA graph, then replayed
    from then on   replayed

A shape's eager steps and its graph run the same code on the same buffers, so they leave the same bits in any order;
generations come from counters in device memory. A step is one CUDA graph: the copies to and from the host, and all
layers of all local ranks.

* **Lockstep.** Ranks in several processes on one device are time-sliced: one that spins keeps its producer away for a
  whole slice. They run eagerly and meet at a control-plane barrier after every stage that pushes. So does the first
  step of a shape everywhere: it loads modules, which may take longer than a mailbox deadline.
* **Host work** of a replayed step, from the plan to the launched graph: medians of runs in us, virtual machine with an
  H200 and nothing else of ours on it. Rows are hashed on the device and stay there (`device_buffers`): copied out and
  hashed on the host they drive what a launch needs out of its caches. `device_graph` has other forms of the launch.

                                                  rows stay     rows to the host
      1 layer, 8 local ranks, 5 rows              11..12            13..14
      24 layers, 1 rank, 5 rows                   12..65            28..35
      24 layers, 8 local ranks, 5 rows            15..47            38..42
      24 layers, 8 local ranks, 20 rows           34..77            57..63, elsewhere 78
      ..., empty graphs from 0.9 of a step        30..39

  The spread is the machine's: one form of the code ran four times within a minute, its launch took 19, 24, 27 and 43,
  and Python beside it grew alike; no page faults, no lost core. A wait that spins or a pinned thread changed nothing.
  Launches of an empty graph throughout a step make one of 17 ms 0.16 ms longer; from `WARM_FROM` on they cost nothing
  that its time shows (`results/host-work-h200-20261130.json`).

* `expired` is looked at after every step, replays included: `MailboxTimeout` then names who waited for whom. While the
  host waits for a step it looks for peers that have died. It names them once the kernels' waits have expired too, at
  the latest after a deadline or `LAST_WAIT_SECONDS`, whichever is shorter, and `LAUNCH_SECONDS`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from dcp_decode.control.plane import ControlPlane
from dcp_decode.device_buffers import StepBuffers
from dcp_decode.device_graph import StepGraph
from dcp_decode.device_rank import NEEDLE_ROWS, DeviceGroup, StepShape, step_shape
from dcp_decode.device_timing import StageClock
from dcp_decode.errors import RankDied, WrongResult
from dcp_decode.mailbox import Mailbox
from dcp_decode.service import RequestState
from dcp_decode.step import AfterStage, Batch, BeforeStage, StepResult, verify_layer
from dcp_decode.verification import check_needle_group
from dcp_decode.waits import MailboxTimeout, Wait, read_record

PUSHES = frozenset({"select_push", "query_push", "sparse_decode_push", "value_push", "fused_chain"})
POLL_SECONDS = 20e-6  # between two looks at a step that has not ended: well below a step's milliseconds
# Between these shares of the time that the step before took, an empty graph is launched at every look: the launch of
# the next step then finds in the host's caches what both need (results/host-work-h200-20261130.json). It ends because
# a queue of launches that a stuck device doesn't run would block the host. Not on a GPU that processes share, where
# only tests replay: with it, in 2 of 4 runs of which one process was killed, the kernels of another failed there.
WARM_FROM, WARM_UNTIL = 0.9, 1.5
LAST_WAIT_SECONDS = 2.0  # for a step whose peer has died, at most: so long may its kernels say whom they waited for
LAUNCH_SECONDS = 0.2  # until kernels begin to wait, where processes share a device


@dataclass(frozen=True)
class StepPolicy:
    """How steps may run on a GPU. may_replay: called with the step's number; False makes the step eager.

    graphs: False captures nothing at all.
    lockstep: eager steps, of which all ranks end a stage before any begins the next; None: where ranks share a device.
    """

    may_replay: Callable[[int], bool] = lambda step: True
    graphs: bool = True
    lockstep: bool | None = None


AS_PLACED = StepPolicy()


@dataclass
class StepStatistics:
    """How the steps of a process ran.

    Of each replay: host_seconds from the plan to the launched graph, step_seconds from the plan to its results.
    bytes_after_capture, bytes_at_end: in use on the whole device (0 on a CPU) once the newest graph has been replayed
    and, where steps run eagerly beside it, the first of them has run; and after the last step.
    notes: one line a shape, and what else decided.
    """

    replays: int = 0
    eager_steps: int = 0
    captures: int = 0
    host_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    bytes_after_capture: int = 0
    bytes_at_end: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StageTimes:
    """Stage times of a rank after a run: (rank, a time for each of `step.TIMED`) an iteration, and how they came."""

    seconds: list[tuple[int, tuple[float, ...]]]
    clock: str


class DeviceSteps:
    """The steps of the local ranks of one process.

    rows_a_request: rows that a request brings to every step. shared: ranks of other processes share this device.
    before_stage: makes every step eager.
    """

    def __init__(
        self,
        group: DeviceGroup,
        route: str,
        rows_a_request: int,
        control: ControlPlane,
        shared: bool,
        deadline_seconds: float,
        policy: StepPolicy = AS_PLACED,
        before_stage: BeforeStage | None = None,
    ) -> None:
        self.group = group
        self.ranks = group.ranks()
        self.geometry = group.geometry
        self.device = group.device
        self.layers = group.layers
        self.route = route
        self.rows_a_request = rows_a_request
        self.control = control
        self.shared = shared
        self.lockstep = shared if policy.lockstep is None else policy.lockstep
        self.deadline_seconds = deadline_seconds
        self.may_replay = policy.may_replay
        self.before_stage = before_stage
        self.statistics = StepStatistics()
        self._shapes: dict[StepShape, StepBuffers] = {}
        self._newest: StepBuffers | None = None
        self._cache_emptied = False  # since the last eager step
        self._on_gpu = self.device.type == "cuda"
        self._idle: StepGraph | None = None
        self._stream = torch.cuda.Stream(self.device) if self._on_gpu else None
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        # Whether a step may be a graph.
        self._replays = self._on_gpu and policy.graphs and not self.lockstep and before_stage is None
        if self.lockstep:
            self.statistics.notes.append("ranks share this device: every step runs eagerly, stage by stage")

    def prefill(self, request: RequestState) -> None:
        """Write a request's prompt into all layers of all local ranks' caches."""
        with self._on_stream():
            table = torch.tensor(request.pages, dtype=torch.int64, device=self.device)
            for layer in range(self.layers):
                for rank in self.ranks:
                    rank.prefill(layer, request, table)
        self._synchronize()

    def check_needle(self, seed: int) -> None:
        """`verification.check_needle_group` on the local ranks. Raises WrongResult, MailboxTimeout or RankDied."""
        rows = min(NEEDLE_ROWS, self.geometry.capacity)
        group = [rank.stages for rank in self.ranks]
        for stages in group:
            stages.prepare(rows)
        self.control.barrier("kernels for the needle test")
        with self._on_stream():
            try:
                check_needle_group(group, self.geometry, self.route, seed, self.device, self.synchronize_ranks)
            except WrongResult:
                self._refuse_expired(any(int(mailbox.abort_word) for mailbox in self._mailboxes))
                raise

    def run(self, step: int, batch: Batch, verified: bool) -> StepResult:
        """One verify step. verified: read merged rows and selected positions back too.

        Raises MailboxTimeout, or RankDied if a peer's process has ended.
        """
        started = time.perf_counter()
        turns = batch.rows[:: self.rows_a_request]
        longest = max([row.position for row in turns]) + self.rows_a_request
        buffers = self._newest
        # Most steps have the shape of the one before: asked by two comparisons.
        if buffers is None or len(turns) != buffers.shape.requests or longest not in buffers.contexts:
            buffers = self._buffers(step_shape(len(turns), self.rows_a_request, longest, self.geometry))
        buffers.write(turns, batch.requests)
        replay = self._replays and self.may_replay(step) and buffers.uses > 0
        captured = replay and buffers.graph is None
        if captured:
            self._capture(buffers)
            started = time.perf_counter()
        launched, expected = None, math.inf
        if replay and buffers.graph is not None:
            buffers.graph.replay()
            launched = time.perf_counter()
            expected = buffers.seconds
        else:
            with self._on_stream():
                lockstep = self.lockstep or not buffers.uses
                after_stage = self.synchronize_ranks if lockstep else None
                self._enqueue(buffers, self.before_stage, after_stage, fuse=self.before_stage is None)
        self._synchronize(expected)
        buffers.uses += 1
        if launched is None:
            self.statistics.eager_steps += 1
        else:
            self.statistics.replays += 1
            self.statistics.host_seconds.append(launched - started)
            buffers.seconds = time.perf_counter() - started
            self.statistics.step_seconds.append(buffers.seconds)
        # A graph's first launch takes its memory; a capture empties torch's cache, and the next eager step fills it.
        if captured or (launched is None and self._cache_emptied):
            self.statistics.bytes_after_capture = self._bytes_in_use()
            self._cache_emptied = captured
        self._newest = buffers
        self._refuse_expired(buffers.any_expired)
        return buffers.result(batch, verified)

    def release_cache(self) -> None:
        """After other work on this device, as verification: what torch keeps of it goes, so that memory stays flat."""
        if self._on_gpu:
            torch.cuda.empty_cache()
            self._cache_emptied = True

    def measure_stages(self, replays: int) -> StageTimes | None:
        """Times of the newest step's stages, from replays of it after the run; None where no graph may run.

        The step is repeated as it was: it appends the same tokens again. Raises as `run`.
        """
        buffers = self._newest
        if buffers is None or not self._replays:
            return None
        seconds, empty = self._time_stages(buffers, replays, fuse=False)
        chain = "the sum of its stages"
        if self.ranks[0].stages.fuses(buffers.shape.rows):
            fused, _ = self._time_stages(buffers, replays, fuse=True)
            seconds = [(rank, (*staged[:-1], one[-1])) for (rank, staged), (_, one) in zip(seconds, fused, strict=True)]
            chain = "one launch, as in the run"
        return StageTimes(
            seconds,
            f"event nodes in a graph of the last step ({buffers.shape}), replayed {replays} times after the run; "
            f"the chain is {chain}; nothing between two events takes {np.median(empty) * 1e6:.2f} us",
        )

    def _time_stages(
        self, buffers: StepBuffers, replays: int, fuse: bool
    ) -> tuple[list[tuple[int, tuple[float, ...]]], list[float]]:
        """As `StageTimes.seconds`, and what two events with nothing between them take, of each replay."""
        clock, graph = StageClock(), torch.cuda.CUDAGraph()
        with self._capturing(graph):
            clock.begin()
            self._enqueue(buffers, clock.before_stage, clock.after_stage, fuse)
        self.control.barrier("graph of the stage times")
        seconds, empty = [], []
        for turn in range(replays + 1):
            with self._on_stream():
                graph.replay()
            self._synchronize()
            self._refuse_expired(buffers.any_expired)
            if turn:  # the first replay uploads the graph
                seconds += clock.seconds()
                empty.append(clock.empty_seconds())
        return seconds, empty

    def finish(self) -> StepStatistics:
        """The statistics, once all steps have run."""
        self.statistics.bytes_at_end = self._bytes_in_use()
        return self.statistics

    def synchronize_ranks(self, name: str) -> None:
        """After a stage that pushes: no rank goes on before every process's kernels have ended."""
        if name in PUSHES:
            self._synchronize()
            self.control.barrier(f"{name} on a shared device")

    def _buffers(self, shape: StepShape) -> StepBuffers:
        if shape not in self._shapes:
            for rank in self.ranks:
                rank.stages.prepare(shape.rows)
            numbers = [rank.rank for rank in self.ranks]
            self._shapes[shape] = StepBuffers(shape, self.geometry, self.layers, numbers, self.device)
            self.statistics.notes.append(f"{shape}: not captured yet, so its first step ran eagerly")
            # Compilation takes longer than a mailbox deadline.
            self.control.barrier(f"kernels for {shape}")
        return self._shapes[shape]

    def _enqueue(
        self, buffers: StepBuffers, before_stage: BeforeStage | None, after_stage: AfterStage | None, fuse: bool
    ) -> None:
        """All stages of all layers of all local ranks: eager, or into the graph that is being captured."""
        buffers.load()
        batch = self.group.begin(buffers.shape, buffers.integers)
        for layer in range(self.layers):
            buffers.keep(layer, verify_layer(self.ranks, layer, batch, self.route, before_stage, after_stage, fuse))
        buffers.read(batch, self.group.stages)

    def _capture(self, buffers: StepBuffers) -> None:
        assert self._stream is not None
        captured = torch.cuda.CUDAGraph(keep_graph=True)
        with self._capturing(captured):
            self._enqueue(buffers, None, None, fuse=True)
        buffers.graph = StepGraph(captured, self._stream)
        if self._idle is None:
            self._idle = StepGraph(None, torch.cuda.Stream(self.device))
        self.statistics.captures += 1
        self.control.barrier(f"graph of {buffers.shape}")

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def _refuse_expired(self, expired: bool) -> None:
        if not expired:
            return
        self._refuse_dead_peers(at_once=True)
        raise MailboxTimeout(self._expired_waits(), self.deadline_seconds)

    def _refuse_dead_peers(self, at_once: bool = False, device_error: str = "") -> None:
        """device_error: of a GPU whose memory can't be read any more."""
        dead = self.control.dead_peers(at_once)
        if not dead:
            return
        names = ", ".join(f"rank {rank} {how}" for rank, how in sorted(dead.items()))
        waits = [] if device_error else self._expired_waits()
        records = [wait.as_dict() for wait in waits] or [
            {"stage": "verify step", "waiting_rank": rank.rank, "source_rank": source}
            for rank in self.ranks
            for source in dead
        ]
        consequence = [f"then this rank's GPU failed: {device_error}"] if device_error else map(str, waits)
        raise RankDied("; ".join([names, *consequence]), records)

    def _expired_waits(self) -> list[Wait]:
        return [wait for wait in map(read_record, self._mailboxes) if wait is not None]

    @property
    def _mailboxes(self) -> list[Mailbox]:
        return [rank.stages.mailbox for rank in self.ranks]

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _synchronize(self, expected_seconds: float = math.inf) -> None:
        """Wait for what was launched on the own stream; as `_wait_for`."""
        if self._stream is not None:
            self._wait_for(self._stream, expected_seconds)

    def _wait_for(self, stream: torch.cuda.Stream, expected_seconds: float = math.inf) -> None:
        """Wait for a stream. Raises RankDied if a peer has died: the step can't end well then.

        If possible once the kernels' own waits have expired, so that they say whom they waited for. expected_seconds:
        of the wait, where a launch follows that should be short.
        """
        # Polled, because a blocking call would keep signals, and the death of a peer, waiting for the step's deadlines.
        patience = min(self.deadline_seconds, LAST_WAIT_SECONDS) + LAUNCH_SECONDS
        give_up = None
        idle = None if self.shared else self._idle
        started = time.monotonic()
        try:
            while not stream.query():
                now = time.monotonic()
                if idle is not None and WARM_FROM <= (now - started) / expected_seconds < WARM_UNTIL:
                    idle.replay()
                if give_up is None and self.control.dead_peers():
                    give_up = now + patience
                if give_up is not None and now > give_up:
                    break
                time.sleep(POLL_SECONDS)
        except RuntimeError as error:
            # Kernels use memory of a peer, which its end may take away.
            self._refuse_dead_peers(at_once=True, device_error=str(error).partition("\n")[0])
            raise
        if give_up is not None:
            self._refuse_dead_peers()

    def _bytes_in_use(self) -> int:
        if not self._on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free
