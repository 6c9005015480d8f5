"""Several GPUs of one host, one rank each: torchrun --standalone --nproc-per-node N -m pytest -m multigpu, or mpirun.

Every rank runs these tests, and they meet in the runs' own collectives; what only rank 0 checks ends at a barrier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("pydantic", reason="the service's config needs pydantic")

from fault_case import check_fault

from dcp_decode.config import load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.device_steps import StepPolicy
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.launcher import connect, detect_launcher
from dcp_decode.run import TIMED_REPLAYS, run_rank

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]

LAYERS = 3  # odd: the uses of a step then change generation
STEPS = 24
FABRICS = ["nvshmem", "symm_mem"]


@pytest.fixture(scope="module")
def control() -> Iterator[ControlPlane]:
    plane = connect(detect_launcher(os.environ), 240.0)  # rank 0 alone runs the loopback, and the groups with faults
    yield plane
    plane.close()


def values(fabric: str, dcp: int, route: str = "push") -> dict[str, object]:
    return {
        "parallel.device": "cuda",
        "parallel.fabric": fabric,
        "parallel.dcp": dcp,
        "parallel.route": route,
        "model.layers": LAYERS,
        "service.max_steps": STEPS,
        "verify.mode": "sample",
        "verify.period": 8,
    }


@pytest.fixture(scope="module")
def loopback_digests() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("route", ["push", "local"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_every_fabric_gives_the_digest_of_loopback(control, loopback_digests, fabric, route):
    if fabric == "nvshmem":
        pytest.importorskip("nvshmem", reason="needs nvshmem4py")
    summary = run_rank(load_config(None, values(fabric, control.size, route)), control)
    assert summary.fabric == fabric
    assert summary.verified is True
    assert summary.execution["replays"] > 0
    assert len(summary.stage_seconds["chain"]) == TIMED_REPLAYS * LAYERS
    if control.rank == 0 and route not in loopback_digests:
        alone = values("loopback", control.size, route) | {"verify.mode": "off"}
        loopback_digests[route] = run_rank(load_config(None, alone), SoloControlPlane()).digest
    control.barrier("loopback digest")
    if control.rank == 0:
        assert summary.digest == loopback_digests[route]


@pytest.mark.parametrize("fabric", FABRICS)
def test_eager_steps_between_replays_change_no_bit(control, fabric):
    if fabric == "nvshmem":
        pytest.importorskip("nvshmem", reason="needs nvshmem4py")
    config = load_config(None, values(fabric, control.size) | {"verify.mode": "off"})
    policies = (StepPolicy(), StepPolicy(may_replay=lambda step: step % 3 != 1), StepPolicy(lambda step: False))
    assert len({run_rank(config, control, policy=policy).digest for policy in policies}) == 1


@pytest.mark.parametrize("fabric", FABRICS)
def test_chains_of_one_launch_change_no_bit(control, fabric):
    if fabric == "nvshmem":
        pytest.importorskip("nvshmem", reason="needs nvshmem4py")
    one_request = values(fabric, control.size) | {"mailbox.capacity": 5}  # so that every step has five rows
    staged = run_rank(load_config(None, one_request | {"parallel.chain": "staged"}), control)
    try:
        fused = run_rank(load_config(None, one_request | {"parallel.chain": "fused"}), control)
    except UnsupportedEnvironment as refusal:  # on all ranks alike
        pytest.skip(str(refusal))
    assert fused.verified is True
    assert fused.digest == staged.digest


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_that_dies_or_stops_is_named_by_all_others_within_the_deadline(control, fabric, fault, tmp_path):
    if fabric == "nvshmem":
        pytest.importorskip("nvshmem", reason="needs nvshmem4py")
    try:
        if control.rank == 0:  # starts a group of its own on the same GPUs
            check_fault(fault, fabric, control.size, tmp_path)
    finally:
        control.barrier(f"{fabric} with a rank that must {fault}")
