"""Eight NVSHMEM processes on one GPU: one digest under every launcher, and ranks that die or stop."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the service's config needs pydantic")
pytest.importorskip("nvshmem", reason="needs nvshmem4py")

from rank_launch import FAULT_RANK, MPIRUN, launcher_command, run_ranks

from dcp_decode.config import load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.errors import VERIFIED, WAIT_EXPIRED
from dcp_decode.run import run_rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

SMALL = {"parallel.device": "cuda", "model.layers": 1, "service.max_steps": 6}
VICTIM = 3
FAULT_STEP = 4
CYCLES = 100


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
    assert conclusion.exit_code == VERIFIED, conclusion.error
    assert document["verified"] is True
    assert document["fabric"] == "nvshmem"
    assert len(set(document["process_ids"])) == 8
    assert document["digest"] == loopback_digest


CONFIG = """
[model]
layers = 1
[parallel]
device = "cuda"
fabric = "nvshmem"
[mailbox]
capacity = 5
[service]
max_steps = 12
[verify]
mode = "off"
[workload.synthetic]
requests = 1
input_length = 3000
output_length = 200
"""


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_that_dies_or_stops_is_named_by_all_others_within_the_deadline(fault, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    config, note = load_config(path), tmp_path / "fault-time"
    arguments = [str(FAULT_RANK), str(path), fault, str(VICTIM), str(FAULT_STEP), str(note)]
    conclusion = run_ranks("torchrun", config, arguments, tmp_path / "records", 120)
    assert conclusion.exit_code == WAIT_EXPIRED, conclusion.error
    assert f"rank {VICTIM}" in conclusion.error
    happened = float(note.read_text())
    survivors = [record for record in conclusion.document["records"] if record["rank"] != VICTIM]
    for record in survivors:
        named = f"rank {VICTIM}" in (record["error"] or "") or str(VICTIM) in record["dead_peers"]
        assert named, record
        # One mailbox deadline, and what raising, telling and writing take on a machine that runs eight such processes.
        assert record["ended"] - happened < config.mailbox.deadline_seconds + 1.0, record
    if fault == "stop":
        waits = conclusion.document["expired_waits"]
        assert waits, "nobody's kernels gave up"
        assert {wait["source_rank"] for wait in waits if wait["stage"] == "TOPK"} == {VICTIM}


def test_a_hundred_starts_and_ends_of_nvshmem_leak_nothing(tmp_path):
    output = tmp_path / "used.json"
    command = [*launcher_command("torchrun", 2), str(Path(__file__).parent / "fabric_cycles.py"), str(CYCLES)]
    finished = subprocess.run([*command, str(output)], capture_output=True, text=True, timeout=140, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    used = json.loads(output.read_text())
    assert len(used) == CYCLES
    settled = used[CYCLES // 10]
    assert used[-1] == settled
