"""The whole service on a GPU: eight virtual ranks in one process, and eight NVSHMEM processes on the one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="the service's config needs pydantic")

from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.run import run_rank
from dcp_decode.summary import RunSummary

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 3  # odd: the uses of a step then change generation


def gpu_config(**overrides: object) -> RunConfig:
    values = {
        "parallel.device": "cuda",
        "parallel.fabric": "loopback",
        "model.layers": LAYERS,
        "service.max_steps": 24,
        "verify.mode": "off",
    }
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, values)


def run_here(config: RunConfig, may_replay=lambda step: True) -> RunSummary:
    return run_rank(config, SoloControlPlane(), may_replay=may_replay)


@pytest.mark.parametrize("route", ["push", "local"])
def test_verified_end_to_end(route):
    config = gpu_config(parallel__route=route, verify__mode="sample", verify__period=6)
    summary = run_here(config)
    assert summary.verified is True
    assert summary.checked_steps == 4
    assert summary.device.startswith("cuda")


def test_graphs_and_eager_steps_in_any_order_leave_one_digest():
    config = gpu_config()
    digests = {
        run_here(config, may_replay).digest
        for may_replay in (lambda step: True, lambda step: False, lambda step: step % 3 != 1)
    }
    assert len(digests) == 1


def test_another_seed_has_another_digest():
    assert run_here(gpu_config()).digest != run_here(gpu_config(workload__seed=2)).digest


def launch(command: list[str], folder: Path, **environment: str) -> dict:
    output = folder / "run.json"
    options = ["--device", "cuda", "--fabric", "nvshmem", "--layers", "1", "--max-steps", "6", "--output", str(output)]
    finished = subprocess.run(
        [*command, "run", *options],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert output.exists(), finished.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.timeout(150)
def test_eight_processes_on_one_gpu(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    document = launch([*torchrun, "-m", "dcp_decode"], tmp_path)
    assert document["verified"] is True, document["error"]
    assert document["fabric"] == "nvshmem"
    alone = run_here(gpu_config(model__layers=1, service__max_steps=6))
    assert document["digest"] == alone.digest


def test_device_memory_does_not_grow_with_runs():
    config = gpu_config(service__max_steps=4)
    run_here(config)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run_here(config)
    assert torch.cuda.memory_allocated() <= before
