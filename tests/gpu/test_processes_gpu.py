"""Eight NVSHMEM processes on one GPU: one digest under every launcher, and ranks that die or stop."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the service's config needs pydantic")
pytest.importorskip("nvshmem", reason="needs nvshmem4py")

from fault_case import check_fault
from rank_launch import MPIRUN, OUTPUT, launcher_command, run_ranks

from dcp_decode.config import load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.errors import VERIFIED
from dcp_decode.run import run_rank

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(150)]

SMALL = {"parallel.device": "cuda", "model.layers": 1, "service.max_steps": 6}
CYCLES = 50  # of each kind
GRANULE = 4 << 20  # of the device's memory, of both processes


@pytest.fixture(scope="module")
def loopback_digest() -> str:
    config = load_config(None, SMALL | {"parallel.fabric": "loopback", "verify.mode": "off"})
    return run_rank(config, SoloControlPlane()).digest


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_every_launcher_gives_the_digest_of_loopback(launcher, tmp_path, loopback_digest):
    if launcher == "mpi" and MPIRUN is None:
        pytest.skip("needs mpirun")
    config = load_config(None, SMALL)
    options = ["--device", "cuda", "--layers", "1", "--max-steps", "6"]
    conclusion = run_ranks(launcher, config, ["-m", "dcp_decode", "run", *options], tmp_path, 120)
    document = conclusion.document
    assert conclusion.exit_code == VERIFIED, f"{conclusion.error}\n{(tmp_path / OUTPUT).read_text()[-2000:]}"
    assert document["verified"] is True
    assert document["fabric"] == "nvshmem"
    assert len(set(document["process_ids"])) == 8
    assert document["digest"] == loopback_digest


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_that_dies_or_stops_is_named_by_all_others_within_the_deadline(fault, tmp_path):
    check_fault(fault, "nvshmem", 8, tmp_path)


def test_a_hundred_starts_and_ends_of_nvshmem_leak_nothing(tmp_path):
    """NVSHMEM 3.4.5 itself keeps about 1 MiB of device memory a process and start; regions add nothing to that.

    One that stayed behind would add 1 MiB a process and cycle.
    """
    output = tmp_path / "used.json"
    command = [*launcher_command("torchrun", 2), str(Path(__file__).parent / "fabric_cycles.py"), str(CYCLES)]
    finished = subprocess.run([*command, str(output)], capture_output=True, text=True, timeout=140, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    found = json.loads(output.read_text())
    growth = {}
    for name, used in found.items():
        settled, last = used[CYCLES // 5], used[-1]
        assert (last["files"], last["threads"]) == (settled["files"], settled["threads"])
        growth[name] = last["device_bytes"] - settled["device_bytes"]
    assert growth["used"] <= growth["bare"] + GRANULE, growth
