"""torchrun and mpirun for real: their control planes with a stub body, and `launch/*.sh` when a rank is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dcp_decode.config import load_config
from dcp_decode.errors import BAD_INPUT, VERIFIED, WAIT_EXPIRED
from dcp_decode.forensics.archive import read
from dcp_decode.records import RECORDS_VARIABLE, make_plan, read_records
from dcp_decode.results import conclude

pytestmark = pytest.mark.xdist_group("launch")

REPOSITORY = Path(__file__).resolve().parent.parent
STUB = REPOSITORY / "tests" / "launch_stub.py"
BIN = Path(sys.executable).parent
# As launch/*.sh set it; Open MPI 4 ends where it finds no ssh.
PYTHONPATH = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {"OMPI_MCA_plm_rsh_agent": "/bin/true"} | os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
MPIRUN = shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")

MPI_FLAGS = ["--oversubscribe", "--bind-to", "none", "--mca", "osc", "^ucx"]
if os.geteuid() == 0:
    MPI_FLAGS.append("--allow-run-as-root")
MPI = pytest.param("mpi", marks=pytest.mark.skipif(MPIRUN is None, reason="needs mpirun"))
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
    "mpi": [str(MPIRUN), *MPI_FLAGS, "-n"],
}

# Four ranks that stay in verify steps for minutes: many drafts' worth of output, nothing checked.
ENDLESS = """
[model]
layers = 1
topk = 64
[parallel]
dcp = 4
[service]
max_steps = 100000
[workload.synthetic]
requests = 4
input_length = 256
output_length = 20000
[verify]
mode = "off"
"""


def run_stub(
    launcher: str, behaviour: str, size: int, output: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The stub under a bare torchrun or mpirun with `size` ranks."""
    python = [] if launcher == "torchrun" else [sys.executable]
    command = [*LAUNCHERS[launcher], str(size), *python, str(STUB), behaviour, str(size), str(output)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | (variables or {}), timeout=120)


@pytest.mark.parametrize("launcher", ["torchrun", MPI])
def test_collectives(launcher: str, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    run = run_stub(launcher, "collectives", 4, output)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(output)
    document = json.loads(output.read_text())
    assert (document["digest"], document["launcher"], document["verified"]) == (f"{launcher} 4", launcher, True)
    assert len(set(document["process_ids"])) == 4


@pytest.mark.parametrize("launcher", ["torchrun", MPI])
def test_rank_killed_in_a_barrier_is_named(launcher: str, tmp_path: Path) -> None:
    # With a folder given, as by launch/*.sh, nobody concludes but the one who gave it.
    run = run_stub(launcher, "kill", 4, tmp_path / "out.json", {RECORDS_VARIABLE: str(tmp_path)})
    assert run.returncode != 0
    records = read_records(tmp_path)
    assert list(records) == [0, 1, 2]
    conclusion = conclude(make_plan("stub", load_config(None, {"parallel.dcp": 4}), launcher, None), records)
    assert (conclusion.exit_code, conclusion.dead_ranks) == (WAIT_EXPIRED, (3,))
    waits = [(wait["label"], wait["source_rank"]) for wait in conclusion.document["expired_waits"]]
    assert ("meeting", 3) in waits


def test_without_rank_0_another_one_concludes(tmp_path: Path) -> None:
    # A bare launcher: nobody outlives the ranks.
    output = tmp_path / "out.json"
    run = run_stub("torchrun", "kill first", 2, output)
    assert run.returncode != 0
    document = json.loads(output.read_text())
    assert (document["exit_code"], document["dead_ranks"]) == (WAIT_EXPIRED, [0])
    assert (document["first_cause"]["kind"], document["first_cause"]["rank"]) == ("dead rank", 0)
    assert run.stdout.splitlines() == [str(output)]


@pytest.mark.parametrize("launcher", ["torchrun", MPI])
def test_wrong_world_size_is_one_clear_line(launcher: str) -> None:
    product = ["-m", "dcp_decode", "run"]
    command = [*LAUNCHERS[launcher], "2", *(product if launcher == "torchrun" else [sys.executable, *product])]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert run.returncode != 0
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: {launcher} started 2 ranks, but parallel.dcp is 8"]


def ranks_with_mailboxes(parent: int) -> list[int]:
    """Descendants of a process that have mapped shared-memory mailboxes."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        try:
            maps = Path(f"/proc/{child}/maps").read_text()
            found += [int(child)] if "/dev/shm/" in maps else []
            found += ranks_with_mailboxes(int(child))
        except OSError:
            continue  # ended meanwhile
    return sorted(found)


COMMANDS = {
    "builtin": [sys.executable, "-m", "dcp_decode"],
    "torchrun": [str(REPOSITORY / "launch" / "torchrun.sh")],
    "mpi": [str(REPOSITORY / "launch" / "mpirun.sh")],
}


@pytest.mark.parametrize("launcher", ["builtin", "torchrun", MPI])
def test_rank_killed_in_a_verify_step_stops_all(launcher: str, tmp_path: Path) -> None:
    config, output = tmp_path / "endless.toml", tmp_path / "out.json"
    config.write_text(ENDLESS)
    process = subprocess.Popen(
        [*COMMANDS[launcher], "run", str(config), "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    until = time.monotonic() + 90
    while len(ranks := ranks_with_mailboxes(process.pid)) < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1.5)  # past the first barriers, into the steps; wherever it is, the outcome must be the same
    victim = ranks[-2]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    output_text, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - killed

    document: dict[str, Any] = json.loads(output.read_text())
    assert process.returncode == document["exit_code"] == WAIT_EXPIRED, errors
    assert output_text.splitlines()[-1] == str(output)
    assert len(document["dead_ranks"]) == 1
    dead = document["dead_ranks"][0]
    assert document["process_ids"][dead] in (victim, None)  # None: known only to a launcher that is not ours
    assert f"error: rank {dead} died" in errors
    assert "Traceback" not in errors
    survivors = [record for record in document["records"] if record["rank"] != dead]
    assert len(survivors) == 3
    # A launcher that is not ours ends the survivors at once, perhaps before any of them waits for the dead rank.
    ended_early = all(record["outcome"] == "terminated" for record in survivors)
    assert document["expired_waits"] or ended_early, document["records"]
    assert not (ended_early and launcher == "builtin"), document["records"]
    assert all(str(dead) in record["dead_peers"] or record["outcome"] == "terminated" for record in survivors)
    # Told to stop at once, and killed 0.25 s later by mpirun: every survivor still left its evidence.
    assert (document["first_cause"]["kind"], document["first_cause"]["rank"]) == ("dead rank", dead)
    evidence = read(Path(document["forensics"])).evidence
    assert list(evidence) == [record["rank"] for record in survivors]
    assert all(dead in one.peers and one.processes[dead].process_id == victim for one in evidence.values())
    # Mailbox deadline 2 s, the launcher's own grace, and the start of `conclude` on a busy machine.
    assert seconds < 15


@pytest.mark.parametrize("launcher", ["torchrun", MPI])
def test_launch_script_verifies_or_refuses(launcher: str, tmp_path: Path) -> None:
    script = COMMANDS[launcher][0]
    refused = subprocess.run([script, "run", "--layers", "0"], capture_output=True, text=True, timeout=60)
    assert (refused.returncode, refused.stdout) == (BAD_INPUT, "")
    assert refused.stderr == "error: model.layers = 0: must be an integer in 1 .. 256\n"

    config, output = tmp_path / "short.toml", tmp_path / "out.json"
    config.write_text(ENDLESS.replace("100000", "1").replace("off", "every"))
    run = subprocess.run(
        [script, "run", str(config), "--output", str(output)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == VERIFIED, run.stderr
    assert json.loads(output.read_text())["verified"] is True


@pytest.mark.parametrize("command", [["run"], ["checkpoint", "--mode", "group"]])
@pytest.mark.parametrize("launcher", ["torchrun", MPI])
def test_launch_script_refuses_a_fabric_of_one_process_before_its_ranks_start(
    launcher: str, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('a refusal needs no torch')")
    refused = subprocess.run(
        [COMMANDS[launcher][0], *command, "--fabric", "loopback"],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join((str(tmp_path), PYTHONPATH))},
    )
    assert (refused.returncode, refused.stdout) == (BAD_INPUT, "")
    reason = f"parallel.fabric = loopback runs all ranks in one process: start it without {launcher}"
    assert refused.stderr == f"error: {reason}\n"
