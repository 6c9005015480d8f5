"""Runs verify steps on a device: one copy of integers to it, one graph launch, one read of the results.

    shape new      eager: compile kernels, every rank's stage before any rank's next, with a barrier between processes
    second use     captured as a CUDA graph, then replayed
    from then on   replayed

A shape's eager steps and its graph run the same code on the same buffers, so they leave the same bits in any order;
generations come from counters in device memory. A step is one CUDA graph: all layers of all local ranks.

* Results go to buffers of the shape: merged rows, counts, selected positions, and one word a rank that is not 0 when a
  wait of it has expired. Only the merged rows, counts and words are read back after every step.
* **Lockstep.** Ranks in several processes on one device are time-sliced: one that spins keeps its producer away for a
  whole slice. They run eagerly and meet at a control-plane barrier after every stage that pushes. So does the first
  step of a shape everywhere: it loads modules, which may take longer than a mailbox deadline.
* `expired` is looked at after every step, replays included: `MailboxTimeout` then names who waited for whom.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from dcp_decode import numerics
from dcp_decode.control.plane import ControlPlane
from dcp_decode.device_rank import DeviceBatch, DeviceRank, StepShape, step_shape, write_integers
from dcp_decode.errors import RankDied, WrongResult
from dcp_decode.mailbox import Mailbox
from dcp_decode.service import RequestState
from dcp_decode.step import Batch, BeforeStage, LayerResult, verify_layer
from dcp_decode.verification import check_needle_group
from dcp_decode.waits import MailboxTimeout, read_record
from dcp_decode.workload import Workload

PUSHES = frozenset({"select_push", "query_push", "sparse_decode_push", "value_push"})


@dataclass
class StepStatistics:
    """How the steps ran. host_seconds: of each replay, from the plan to the launched graph. notes: one line a shape."""

    replays: int = 0
    eager_steps: int = 0
    captures: int = 0
    host_seconds: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _ShapeBuffers:
    """Inputs and outputs of one shape, at fixed addresses, and its graph once it is captured."""

    def __init__(self, shape: StepShape, ranks: list[DeviceRank], layers: int) -> None:
        geometry, device = ranks[0].geometry, ranks[0].device
        on_gpu = device.type == "cuda"
        self.shape = shape
        self.graph: torch.cuda.CUDAGraph | None = None
        self.uses = 0
        self.host_integers = torch.zeros(shape.integers, dtype=torch.int64, pin_memory=on_gpu)
        self.integers = torch.zeros(shape.integers, dtype=torch.int64, device=device)
        lead = (layers, len(ranks), shape.rows)
        rows = (*lead, geometry.owner_heads, numerics.LATENT_DIM)
        self.merged = torch.zeros(rows, dtype=torch.bfloat16, device=device)
        self.valid = torch.zeros(lead, dtype=torch.int32, device=device)
        self.positions = torch.zeros((*lead, geometry.topk), dtype=torch.int32, device=device)
        self.expired = torch.zeros(len(ranks), dtype=torch.int32, device=device)
        self.host_merged = torch.zeros(rows, dtype=torch.bfloat16, pin_memory=on_gpu)
        self.host_valid = torch.zeros(lead, dtype=torch.int32, pin_memory=on_gpu)
        self.host_expired = torch.zeros(len(ranks), dtype=torch.int32, pin_memory=on_gpu)

    def read(self) -> None:
        """Copy what every step reads to the host, without waiting for it."""
        self.host_merged.copy_(self.merged, non_blocking=True)
        self.host_valid.copy_(self.valid, non_blocking=True)
        self.host_expired.copy_(self.expired, non_blocking=True)


class DeviceSteps:
    """The steps of the local ranks of one process.

    rows_a_request: rows that a request brings to every step. lockstep: ranks of other processes share this device.
    may_replay: called with the step's number; False makes the step eager. before_stage: makes every step eager.
    """

    def __init__(
        self,
        ranks: list[DeviceRank],
        workload: Workload,
        layers: int,
        route: str,
        rows_a_request: int,
        control: ControlPlane,
        lockstep: bool,
        deadline_seconds: float,
        may_replay: Callable[[int], bool] = lambda step: True,
        before_stage: BeforeStage | None = None,
    ) -> None:
        self.ranks = ranks
        self.geometry = ranks[0].geometry
        self.device = ranks[0].device
        self.workload = workload
        self.layers = layers
        self.route = route
        self.rows_a_request = rows_a_request
        self.control = control
        self.lockstep = lockstep
        self.deadline_seconds = deadline_seconds
        self.may_replay = may_replay
        self.before_stage = before_stage
        self.statistics = StepStatistics()
        first = ranks[0].rank * self.geometry.owner_heads
        self._heads = range(first, first + len(ranks) * self.geometry.owner_heads)
        self._shapes: dict[StepShape, _ShapeBuffers] = {}
        self._tables: dict[int, np.ndarray] = {}
        self._on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._on_gpu else None
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None

    def prefill(self, request: RequestState) -> None:
        """Write a request's prompt into all layers of all local ranks' caches."""
        self._tables[request.index] = np.array(request.pages, dtype=np.int64)
        with self._on_stream():
            table = torch.tensor(request.pages, dtype=torch.int64, device=self.device)
            for layer in range(self.layers):
                for rank in self.ranks:
                    rank.prefill(layer, request, table)
        self._synchronize()

    def check_needle(self, seed: int) -> None:
        """`verification.check_needle_group` on the local ranks. Raises WrongResult, MailboxTimeout or RankDied."""
        rows = min(2, self.geometry.capacity)
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

    def run(self, step: int, batch: Batch, verified: bool) -> list[LayerResult]:
        """One verify step; a result for every (layer, local rank), valid until the next step.

        verified: also read the selected positions back (else none are in the results). Raises MailboxTimeout, or
        RankDied if a peer's process has ended.
        """
        started = time.perf_counter()
        buffers = self._buffers(step_shape(batch.rows, self.rows_a_request, self.geometry))
        write_integers(buffers.shape, batch.rows, self._tables, buffers.host_integers.numpy())
        replay = self._on_gpu and not self.lockstep and self.before_stage is None and self.may_replay(step)
        if replay and buffers.uses and buffers.graph is None:
            self._capture(buffers)
            started = time.perf_counter()
        with self._on_stream():
            buffers.integers.copy_(buffers.host_integers, non_blocking=True)
            if replay and buffers.graph is not None:
                buffers.graph.replay()
                self.statistics.replays += 1
                self.statistics.host_seconds.append(time.perf_counter() - started)
            else:
                self._enqueue(buffers, lockstep=self.lockstep or not buffers.uses)
                self.statistics.eager_steps += 1
            buffers.read()
        self._synchronize()
        buffers.uses += 1
        self._refuse_expired(bool(buffers.host_expired.any()))
        return self._results(buffers, batch, verified)

    def synchronize_ranks(self, name: str) -> None:
        """After a stage that pushes: no rank goes on before every process's kernels have ended."""
        if name in PUSHES:
            self._synchronize()
            self.control.barrier(f"{name} on a shared device")

    def _buffers(self, shape: StepShape) -> _ShapeBuffers:
        if shape not in self._shapes:
            for rank in self.ranks:
                rank.stages.prepare(shape.rows)
            self._shapes[shape] = _ShapeBuffers(shape, self.ranks, self.layers)
            self.statistics.notes.append(f"{shape}: not captured yet, so its first step ran eagerly")
            # Compilation takes longer than a mailbox deadline.
            self.control.barrier(f"kernels for {shape}")
        return self._shapes[shape]

    def _enqueue(self, buffers: _ShapeBuffers, lockstep: bool) -> None:
        """All stages of all layers of all local ranks: eager, or into the graph that is being captured."""
        batch = DeviceBatch(buffers.shape, buffers.integers, self.workload, self.layers, self._heads)
        for rank in self.ranks:
            rank.begin(batch)
        after_stage = self.synchronize_ranks if lockstep else None
        for layer in range(self.layers):
            runs = verify_layer(self.ranks, layer, batch, self.route, self.before_stage, after_stage)
            for index, run in enumerate(runs):
                buffers.merged[layer, index].copy_(run.merged)
                buffers.valid[layer, index].copy_(run.selection.valid)
                buffers.positions[layer, index].copy_(run.selection.positions)
        for index, mailbox in enumerate(self._mailboxes):
            buffers.expired[index].copy_(mailbox.abort_word)

    def _capture(self, buffers: _ShapeBuffers) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._enqueue(buffers, lockstep=False)
        buffers.graph = graph
        self.statistics.captures += 1
        self.control.barrier(f"graph of {buffers.shape}")

    def _refuse_expired(self, expired: bool) -> None:
        if not expired:
            return
        waits = [wait for wait in map(read_record, self._mailboxes) if wait is not None]
        dead = self.control.dead_peers(at_once=True)
        if dead:
            names = ", ".join(f"rank {rank} {how}" for rank, how in sorted(dead.items()))
            raise RankDied("; ".join([names, *map(str, waits)]), [wait.as_dict() for wait in waits])
        raise MailboxTimeout(waits, self.deadline_seconds)

    def _results(self, buffers: _ShapeBuffers, batch: Batch, verified: bool) -> list[LayerResult]:
        count = len(batch.rows)
        kept = buffers.positions if verified else buffers.positions[..., :0]
        positions = kept.cpu().to(torch.int64)
        return [
            LayerResult(
                rank.rank,
                layer,
                batch,
                buffers.host_merged[layer, index, :count],
                buffers.host_valid[layer, index, :count],
                positions[layer, index, :count],
            )
            for layer in range(self.layers)
            for index, rank in enumerate(self.ranks)
        ]

    @property
    def _mailboxes(self) -> list[Mailbox]:
        return [rank.stages.mailbox for rank in self.ranks]

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
