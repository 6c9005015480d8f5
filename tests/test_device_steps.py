"""The static-shape step, on the CPU's stages: against the per-row step's bits, and the oracle's bounds."""

from __future__ import annotations

import gc
import math
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dcp_decode import device_steps
from dcp_decode.cache import FlatCache, PagePool
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.device_buffers import StepBuffers
from dcp_decode.device_rank import PADDING, DeviceGroup, StepShape, step_shape
from dcp_decode.device_steps import DeviceSteps
from dcp_decode.digest import rows_digest
from dcp_decode.errors import RankDied, WrongResult
from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import Mailbox, MailboxLayout, Stage
from dcp_decode.service import Service, ServiceSettings, VerifyRow
from dcp_decode.step import Batch, RankState, verify_layer
from dcp_decode.trace import TraceRequest
from dcp_decode.verification import Verifier
from dcp_decode.waits import MailboxTimeout, Wait, write_record
from dcp_decode.workload import Workload

GEOMETRY = Geometry(
    heads=32, dcp=4, interleave=2, capacity=9, padded_heads=48, topk=96, page_stride_rows=80, k_scale=0.05
)
LAYERS = 3
PAGES = 24
ROWS_A_REQUEST = 3
# The second and third reach more than one page on every rank; all are short of, or above, topk keys at some step.
REQUESTS = [
    TraceRequest(0, 0, 17, 9),
    TraceRequest(1, 0, 700, 6),
    TraceRequest(2, 1, 250, 12),
    TraceRequest(3, 2, 90, 20),
]


def shape_of(rows: tuple[VerifyRow, ...], rows_a_request: int = ROWS_A_REQUEST, geometry: Geometry = GEOMETRY):
    longest = max(row.position for row in rows) + 1
    return step_shape(len(rows) // rows_a_request, rows_a_request, longest, geometry)


def make_stages(geometry: Geometry, deadline_seconds: float = 5.0) -> list[CpuStages]:
    layout = MailboxLayout(geometry)
    group = []
    for memory in LoopbackFabric(geometry.dcp).allocate(layout.nbytes):
        mailbox = Mailbox(layout, memory)
        mailbox.arm()
        group.append(CpuStages(mailbox, deadline_seconds))
    return group


def make_service(geometry: Geometry) -> Service:
    settings = ServiceSettings(draft_tokens=ROWS_A_REQUEST - 1, acceptance=0.5, seed=3)
    return Service(REQUESTS, settings, geometry, PagePool(PAGES))


def first_batch(steps: DeviceSteps) -> Batch:
    """Of the first step of a service, its prompts in the caches."""
    service = make_service(GEOMETRY)
    plan = service.next_step()
    for index in plan.prefills:
        steps.prefill(service.request(index))
    return Batch(plan.rows, {row.request: service.request(row.request) for row in plan.rows})


def make_steps(geometry: Geometry, workload: Workload, route: str, deadline_seconds: float = 5.0) -> DeviceSteps:
    group = DeviceGroup(geometry, workload, LAYERS, PAGES, make_stages(geometry, deadline_seconds))
    return DeviceSteps(group, route, ROWS_A_REQUEST, SoloControlPlane(), False, deadline_seconds)


@pytest.mark.parametrize("route", ["push", "local"])
def test_every_row_equals_the_per_row_step(route):
    workload = Workload(11, GEOMETRY)
    steps = make_steps(GEOMETRY, workload, route)
    plain = [
        RankState(GEOMETRY, workload, FlatCache(LAYERS, PAGES, GEOMETRY), stages) for stages in make_stages(GEOMETRY)
    ]
    verifier = Verifier(GEOMETRY, workload)
    service = make_service(GEOMETRY)
    shapes = set()
    while (plan := service.next_step()) is not None:
        for index in plan.prefills:
            request = service.request(index)
            steps.prefill(request)
            for layer in range(LAYERS):
                for state in plain:
                    state.prefill(layer, request)
        batch = Batch(plan.rows, {row.request: service.request(row.request) for row in plan.rows})
        shapes.add(shape_of(plan.rows))
        results = iter(steps.run(plan.index, batch, verified=True).results)
        for layer in range(LAYERS):
            for run in verify_layer(plain, layer, batch, route):
                result = next(results)
                assert (result.rank, result.layer) == (run.rank, layer)
                assert torch.equal(result.positions, run.positions)
                assert torch.equal(result.valid, run.valid)
                # With rows of padding a CPU's exp2 may round otherwise, by the vector lane that a row then falls into:
                # the bits may differ, and each (row, head) has its own derived bound.
                if len(plan.rows) == shape_of(plan.rows).rows:
                    assert torch.equal(result.merged.view(torch.int16), run.merged.view(torch.int16))
                else:
                    verifier.check(plan.index, [result])
        for state, rank in zip(plain, steps.ranks, strict=True):
            for layer in range(LAYERS):
                rows = state.cache.rows[layer]
                assert torch.equal(rank.cache.rows[layer][: len(rows)], rows)
        service.complete(plan)
    assert service.counts()["finished"] == len(REQUESTS)
    assert len({shape.requests for shape in shapes}) > 1
    assert len({shape.pages for shape in shapes}) > 1
    assert steps.statistics.eager_steps == service.steps
    assert len(steps.statistics.notes) == len(shapes)


def test_a_digest_of_other_rows_is_found_by_verification(monkeypatch):
    workload = Workload(11, GEOMETRY)
    steps = make_steps(GEOMETRY, workload, "push")
    batch = first_batch(steps)
    right = steps.run(0, batch, verified=True)
    assert right.digests == [one.digest for one in right.results] == [rows_digest(one.merged) for one in right.results]
    monkeypatch.setattr(CpuStages, "digest", lambda self, merged, rows, digests: digests.fill_(7))
    wrong = steps.run(0, batch, verified=True).results[:1]
    with pytest.raises(WrongResult, match="step 0, layer 0, rank 0: the digest made on the device is not that of"):
        Verifier(GEOMETRY, workload).check(0, wrong)


def test_rows_are_read_back_only_for_verification():
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push")
    batch = first_batch(steps)
    unread, read = (steps.run(0, batch, verified=verified) for verified in (False, True))
    assert (unread.results, unread.digests) == ([], read.digests)
    assert unread.valid.shape == (LAYERS, GEOMETRY.dcp, len(batch.rows))
    assert {len(one.merged) for one in read.results} == {len(batch.rows)}


def test_a_step_shape_is_a_bucket_of_the_plan():
    rows = tuple(VerifyRow(request, 100 + row, 1) for request in range(3) for row in range(2))
    wide = replace(GEOMETRY, capacity=64)
    assert shape_of(rows, 2, wide) == StepShape(4, 2, 1)
    assert shape_of(rows, 2, replace(GEOMETRY, capacity=7)) == StepShape(3, 2, 1)
    far = (VerifyRow(0, 64 * 4 * 5, 1), VerifyRow(0, 64 * 4 * 5 + 1, 1))
    assert shape_of(far, 2, wide) == StepShape(1, 2, 8)  # 6 pages on the rank that stores most


@pytest.mark.parametrize("interleave", [1, 2, 48, 64, 100])
def test_contexts_of_a_shape_are_those_that_choose_it(interleave):
    geometry = replace(GEOMETRY, interleave=interleave)
    for longest in range(1, 3000):
        shape = step_shape(1, 2, longest, geometry)
        assert longest in shape.contexts(geometry), longest
        assert longest not in replace(shape, pages=2 * shape.pages).contexts(geometry)


def test_rows_of_padding_see_nothing_whatever_the_last_step_left():
    shape = StepShape(2, 2, 4)
    buffers = StepBuffers(shape, GEOMETRY, 1, [0], torch.device("cpu"))
    requests = {5: SimpleNamespace(pages=[9, 4]), 6: SimpleNamespace(pages=[1, 2, 3])}
    buffers.write((VerifyRow(6, 7, 1), VerifyRow(5, 70, 3)), requests)
    buffers.write((VerifyRow(5, 72, 4),), requests)
    buffers.load()
    assert int(buffers.integers[0]) == 2
    request, first, salt = buffers.integers[1:7].view(2, 3).T
    assert first.tolist() == [72, PADDING]
    assert (int(request[0]), int(salt[0])) == (5, 4)
    assert buffers.integers[7:].view(2, 4)[0, :2].tolist() == [9, 4]


def test_an_expired_wait_names_who_waited_for_whom():
    workload = Workload(11, GEOMETRY)
    steps = make_steps(GEOMETRY, workload, "push", deadline_seconds=0.05)
    batch = first_batch(steps)
    steps.ranks[2].stages.query_push = lambda query: None
    with pytest.raises(MailboxTimeout) as failure:
        steps.run(0, batch, verified=False)
    assert failure.value.waits[0].source_rank == 2
    assert failure.value.waits[0].stage == Stage.SPARSE.name


class Meetings(SoloControlPlane):
    """A control plane that keeps the labels of its barriers."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []

    def barrier(self, label: str) -> None:
        self.labels.append(label)


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_meet_while_kernels_load_and_where_they_share_a_device(shared):
    """Loading takes longer than a mailbox deadline, and so does a peer's turn on a device that both spin on."""
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push")
    control = steps.control = Meetings()
    steps.lockstep = shared
    batch = first_batch(steps)
    pushes = ["select_push", "query_push", "sparse_decode_push"]
    lockstep = [f"{stage} on a shared device" for stage in pushes] * LAYERS
    steps.run(0, batch, verified=False)
    assert control.labels == [f"kernels for {shape_of(batch.rows)}", *lockstep]
    control.labels.clear()
    steps.run(1, batch, verified=False)
    assert control.labels == (lockstep if shared else [])


def test_ranks_meet_before_the_needle_test():
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push")
    control = steps.control = Meetings()
    steps.check_needle(5)
    assert control.labels[0] == "kernels for the needle test"


def test_a_wait_that_expired_ends_the_step_and_the_needle_test_whatever_their_rows(monkeypatch):
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push")
    batch = first_batch(steps)
    read = StepBuffers.read

    def expired(self, device_batch, stages) -> None:
        read(self, device_batch, stages)
        self._expired[:] = 1

    monkeypatch.setattr(StepBuffers, "read", expired)
    with pytest.raises(MailboxTimeout):
        steps.run(0, batch, verified=False)

    def wrong(*_: object) -> None:
        for rank in steps.ranks:
            rank.stages.mailbox.abort_word.fill_(1)
        raise WrongResult("rows of a wait that expired")

    monkeypatch.setattr(device_steps, "check_needle_group", wrong)
    with pytest.raises(MailboxTimeout):
        steps.check_needle(5)


class DyingPeer(SoloControlPlane):
    """A control plane that sees rank 2 die once a stream has been asked for often enough."""

    def dead_peers(self, at_once: bool = False) -> dict[int, str]:
        return {2: "process 77 ended"} if at_once or self.asked >= 3 else {}

    asked = 0


@pytest.mark.parametrize("kernels_expire", [True, False])
def test_a_dead_peer_is_named_with_the_waits_for_it_if_they_expire_in_time(monkeypatch, kernels_expire):
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push", deadline_seconds=0.05)
    control = steps.control = DyingPeer()
    monkeypatch.setattr(device_steps, "LAUNCH_SECONDS", 0.05)
    mailbox = steps.ranks[0].stages.mailbox

    def query() -> bool:
        control.asked += 1
        if control.asked < 10 or not kernels_expire:
            return False
        write_record(mailbox, Wait("SPARSE", 0, 2, 1, 5, 0, 3, -1, 0, 0))
        return True

    started = time.monotonic()
    with pytest.raises(RankDied, match="rank 2 process 77 ended") as failure:
        steps._wait_for(SimpleNamespace(query=query))
    took = time.monotonic() - started
    waits = [(one["stage"], one["waiting_rank"], one["source_rank"]) for one in failure.value.expired_waits]
    if kernels_expire:
        assert waits == [("SPARSE", 0, 2)]
    else:
        assert took >= 0.1
        assert waits == [("verify step", rank, 2) for rank in range(GEOMETRY.dcp)]
    control.asked = 0
    steps._wait_for(SimpleNamespace(query=lambda: True))  # the step had ended before anybody died


def test_a_gpu_that_fails_after_a_peer_has_died_fails_because_of_it(monkeypatch):
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push")

    def query() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure\nadvice")

    with pytest.raises(RuntimeError, match="advice"):  # nobody has died
        steps._wait_for(SimpleNamespace(query=query))
    steps.control = DyingPeer()
    monkeypatch.setattr(device_steps, "read_record", None)  # nothing is read from such a GPU
    with pytest.raises(RankDied, match=r"rank 2 process 77 ended; then this rank's GPU failed: .* failure$"):
        steps._wait_for(SimpleNamespace(query=query))


@pytest.mark.parametrize(("expected", "shared", "warm"), [(math.inf, False, 0), (1.0, False, 3), (1.0, True, 0)])
def test_an_empty_graph_is_launched_about_the_end_of_a_replay(monkeypatch, expected, shared, warm):
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push")
    steps.shared = shared
    launches: list[float] = []
    now = 0.0
    looks = iter([0.0, 0.89, 0.91, 1.0, 1.49, 1.51, 9.0])  # seconds on the clock; at the last, the step has ended

    def query() -> bool:
        nonlocal now
        now = next(looks)
        return now == 9.0

    monkeypatch.setattr(device_steps, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: now))
    steps._idle = SimpleNamespace(replay=lambda: launches.append(now))
    steps._wait_for(SimpleNamespace(query=query), expected)
    assert launches == [0.91, 1.0, 1.49][:warm]


def test_steps_end_with_their_last_reference():
    """A GPU's caches are given back at once, not when Python next looks for cycles."""
    steps = make_steps(GEOMETRY, Workload(11, GEOMETRY), "push")
    group = weakref.ref(steps.group)
    gc.disable()
    try:
        del steps
        assert group() is None
    finally:
        gc.enable()
