"""The whole service on one GPU, eight virtual ranks in one process: verification, graphs, memory, expired waits."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="the service's config needs pydantic")

from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.device_steps import DeviceSteps, StepPolicy
from dcp_decode.errors import WAIT_EXPIRED
from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.kernels.stages import GpuStages
from dcp_decode.run import TIMED_REPLAYS, run_rank
from dcp_decode.step import TIMED
from dcp_decode.summary import RunSummary
from dcp_decode.waits import MailboxTimeout

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 3  # odd: the uses of a step then change generation
HOST_MICROSECONDS = 50.0  # of a replayed step: what the project aims at
EAGER = StepPolicy(may_replay=lambda step: False)


def gpu_config(**overrides: object) -> RunConfig:
    """The default config on one GPU, unverified; a key of the config with __ for its dot."""
    values = {
        "parallel.device": "cuda",
        "parallel.fabric": "loopback",
        "model.layers": LAYERS,
        "service.max_steps": 18,  # before the trace is drained
        "verify.mode": "off",
    }
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, values)


def long_requests(count: int, **overrides: object) -> RunConfig:
    """Requests for as many steps as asked: every step has one shape until its pages grow."""
    synthetic = {"requests": count, "input_length": 3000, "output_length": 12_000}
    return gpu_config(workload__synthetic=synthetic, mailbox__capacity=5 * count, **overrides)


def one_long_request(**overrides: object) -> RunConfig:
    return long_requests(1, **overrides)


def run_here(config: RunConfig, **arguments: object) -> RunSummary:
    return run_rank(config, SoloControlPlane(), **arguments)


@pytest.mark.parametrize("route", ["push", "local"])
def test_verified_end_to_end(route):
    config = gpu_config(parallel__route=route, verify__mode="sample", verify__period=6)
    summary = run_here(config)
    assert summary.verified is True
    assert summary.checked_steps == 3
    assert summary.device.startswith("cuda")
    for name in TIMED:
        times = summary.stage_seconds[name]
        assert len(times) == TIMED_REPLAYS * LAYERS
        assert (times > 0).all()
    chain = summary.stage_seconds["chain"]
    assert (chain >= summary.stage_seconds["sparse_decode"]).all()
    memory = summary.execution["device_bytes"]
    assert memory["at_end"] <= memory["after_last_capture"]


def test_graphs_and_eager_steps_in_any_order_leave_one_digest():
    config = gpu_config()
    policies = (StepPolicy(), EAGER, StepPolicy(may_replay=lambda step: step % 3 != 1))
    summaries = [run_here(config, policy=policy) for policy in policies]
    assert len({summary.digest for summary in summaries}) == 1
    replays = [summary.execution["replays"] for summary in summaries]
    assert replays[0] > replays[2] > replays[1] == 0


def test_the_config_can_ask_for_eager_steps():
    summary = run_here(gpu_config(parallel__execution="eager"))
    assert (summary.execution["replays"], summary.execution["eager_steps"]) == (0, summary.steps)


def test_another_seed_has_another_digest():
    assert run_here(gpu_config()).digest != run_here(gpu_config(workload__seed=2)).digest


@pytest.mark.timeout(180)
def test_two_thousand_replays_with_eager_steps_at_odd_places():
    config = one_long_request(model__layers=1, service__max_steps=2110)
    mixed = run_here(config, policy=StepPolicy(may_replay=lambda step: step % 41 not in (7, 30)))
    execution = mixed.execution
    assert execution["replays"] >= 2000
    assert execution["eager_steps"] >= 100
    assert mixed.digest == run_here(config, policy=EAGER).digest
    memory = execution["device_bytes"]
    assert memory["at_end"] <= memory["after_last_capture"]


@pytest.mark.quiet
@pytest.mark.parametrize(("layers", "ranks", "requests", "topk"), [(1, 8, 1, 256), (24, 1, 1, 256), (24, 8, 4, 2048)])
def test_host_work_of_a_replayed_step(layers, ranks, requests, topk):
    """The least of three runs: other work on the machine takes the caches away that a launch needs."""
    sizes = {"model__layers": layers, "model__topk": topk, "parallel__dcp": ranks}
    config = long_requests(requests, service__max_steps=100, **sizes)
    medians: list[float] = []
    while len(medians) < 3 and min(medians, default=HOST_MICROSECONDS + 1) > HOST_MICROSECONDS:
        execution = run_here(config).execution
        assert execution["replays"] >= 90
        medians.append(execution["host_work"]["p50_us"])
    assert min(medians) <= HOST_MICROSECONDS, medians


def test_an_expired_wait_in_a_replay_names_the_silent_rank_and_ends_the_rest_at_once(monkeypatch):
    """Rank 3 pushes no query in the captured graph: every rank's decode of layer 0 waits for it, then nobody waits.

    So the replay takes a deadline a rank more than those that find the abort words set. Without them the other 23
    layers' decodes would add 8 * 23 deadlines, their merges as much again.
    """
    deadline, ranks, layers = 0.05, 8, 24
    push, wait_for = GpuStages.query_push, DeviceSteps._wait_for
    waited: list[float] = []
    steps: list[DeviceSteps] = []

    def all_but_rank_3(stages: GpuStages, query: torch.Tensor) -> None:
        if stages.rank != 3:
            push(stages, query)

    def silence(progress) -> None:
        if progress.steps == 1:  # it ran eagerly; the second step is captured
            monkeypatch.setattr(GpuStages, "query_push", all_but_rank_3)

    def timed_wait(one: DeviceSteps, stream: torch.cuda.Stream, expected_seconds: float) -> None:
        started = time.perf_counter()
        wait_for(one, stream, expected_seconds)
        waited.append(time.perf_counter() - started)
        steps[:] = [one]

    def replay() -> float:
        started = time.perf_counter()
        steps[0]._newest.graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    monkeypatch.setattr(DeviceSteps, "_wait_for", timed_wait)
    config = one_long_request(model__layers=layers, mailbox__deadline_seconds=deadline)
    with pytest.raises(MailboxTimeout) as failure:
        run_here(config, on_progress=silence)
    waits = failure.value.waits
    assert failure.value.exit_code == WAIT_EXPIRED
    assert [wait.waiting_rank for wait in waits] == list(range(ranks))
    assert {(wait.source_rank, wait.stage) for wait in waits} == {(3, "SPARSE")}
    aborted = statistics.median(replay() for _ in range(5))
    for mailbox in steps[0]._mailboxes:
        mailbox.abort_word.zero_()
    torch.cuda.synchronize()  # a step runs on a stream of its own
    waiting_again = replay()
    for seconds in (waited[-1], waiting_again):
        assert seconds - aborted == pytest.approx(ranks * deadline, rel=0.15), (seconds, aborted)


def allocated_bytes() -> int:
    """On the device, once what earlier tests left in reference cycles is gone."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_a_hundred_runs_of_a_fabric_leak_nothing():
    before = allocated_bytes()
    for _ in range(100):
        fabric = LoopbackFabric(8, "cuda")
        memories = fabric.allocate(1 << 20)
        memories[3].regions[5].fill_(7)
        del memories
        fabric.close()
    assert allocated_bytes() <= before


def test_device_memory_does_not_grow_with_runs():
    config = gpu_config(service__max_steps=4)
    run_here(config)
    before = allocated_bytes()
    for _ in range(3):
        run_here(config)
    assert allocated_bytes() <= before


@pytest.mark.timeout(120)
def test_the_command_finds_its_fabric(tmp_path):
    """As a user types it: one GPU, no launcher, nothing said about a fabric."""
    output = tmp_path / "run.json"
    finished = subprocess.run(
        [sys.executable, "-m", "dcp_decode", "run", "--device", "cuda", "--max-steps", "6", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    document = json.loads(output.read_text())
    assert document["verified"] is True
    if torch.cuda.device_count() < document["ranks"]:
        assert (document["fabric"], document["fabric_reason"]) == ("loopback", "one process runs all ranks")
        assert "loopback (one process runs all ranks)" in finished.stdout
        assert document["execution"]["replays"] > 0
