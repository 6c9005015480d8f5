"""What `launch/` holds: scripts that shellcheck passes, several nodes, the Slurm job, the Kubernetes manifest."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from dcp_decode.job import stages
from dcp_decode.job.stages import Hardware, Settings

REPOSITORY = Path(__file__).resolve().parent.parent
LAUNCH = REPOSITORY / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch"), REPOSITORY / ".ci" / "run"])
SMALL = REPOSITORY / "tests" / "data" / "small.toml"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_passes(script: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    checked = subprocess.run([shellcheck, "--external-sources", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert os.access(script, os.X_OK) or script.name in ("session.sh", "slurm.sbatch", "run")


def two_nodes(folder: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """launch/torchrun.sh once for each of two nodes, both of them this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"DCP_DECODE_RECORDS": str(folder / "records"), "TMPDIR": str(folder / "temporary")}
    (folder / "temporary").mkdir(exist_ok=True)
    processes = [
        subprocess.Popen(
            [str(LAUNCH / "torchrun.sh"), *arguments],
            env=os.environ | shared | {"NODE_RANK": str(node)},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    ended = []
    for process in processes:
        output, errors = process.communicate(timeout=120)
        ended.append(subprocess.CompletedProcess(process.args, process.returncode, output, errors))
    return ended


@pytest.mark.xdist_group("launch")
def test_two_nodes_are_one_group_and_node_0_reports(tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    first, second = two_nodes(tmp_path, "run", str(SMALL), "--output", str(output))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.splitlines()[-1] == str(output)
    assert second.stdout == ""
    assert not any((tmp_path / "temporary").iterdir())
    document = json.loads(output.read_text())
    assert (document["verified"], document["launcher"], document["ranks"]) == (True, "torchrun", 2)
    # The same folder again would mix up the records of two runs.
    for again in two_nodes(tmp_path, "run", str(SMALL)):
        assert (again.returncode, again.stdout) == (2, "")
        assert "has records of another run; give a new folder" in again.stderr


NODES = {"NNODES": "3", "DCP_DECODE_RECORDS": "records", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "two"}, "NNODES = 'two': must be an integer in 1 .. 999999"),
        ({"NNODES": "0"}, "NNODES = '0': must be an integer in 1 .. 999999"),
        ({"NODE_RANK": "x"}, "NODE_RANK = 'x': must be an integer in 0 .. 0"),
        (NODES | {"NODE_RANK": "3"}, "NODE_RANK = '3': must be an integer in 0 .. 2"),
        (NODES | {"MASTER_PORT": "http"}, "MASTER_PORT = 'http': must be an integer in 1 .. 65535"),
        ({"NNODES": "2"}, "DCP_DECODE_RECORDS is not set, but NNODES is 2"),
        ({"NNODES": "2", "DCP_DECODE_RECORDS": "records"}, "MASTER_ADDR is not set, but NNODES is 2"),
        (NODES, "parallel.dcp = 8: must be a multiple of the 3 nodes (NNODES)"),
    ],
)
def test_half_described_nodes_are_refused(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [str(LAUNCH / "torchrun.sh"), "run"],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "output", "errors"),
    [
        ([], {}, 2, "", "usage: launch/mpirun.sh run|checkpoint|doctor"),
        (["soak"], {}, 2, "", "usage: launch/mpirun.sh run|checkpoint|doctor"),
        (["run", "--help"], {}, 0, "Usage: dcp-decode run", ""),
        (["run"], {"NNODES": "2"}, 2, "", "error: NNODES = '2': must be 1"),
        (["run"], {"TMPDIR": "/nowhere"}, 2, "", "mktemp: "),
    ],
)
def test_mpirun_says_what_it_takes(
    arguments: list[str], variables: dict[str, str], code: int, output: str, errors: str
) -> None:
    command = [str(LAUNCH / "mpirun.sh"), *arguments]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, bool(ended.stdout), bool(ended.stderr)) == (code, bool(output), bool(errors))
    assert ended.stdout.startswith(output)
    assert ended.stderr.startswith(errors)


def write_command(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("container", ["", "/images/dcp.sqsh"])
def test_slurm_job_starts_one_task_a_node(container: str, tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands: srun prints what it was asked for and the variables that it hands on."""
    write_command(tmp_path, "scontrol", 'echo "first"; seq 30000')  # more than a pipe holds: only one line is read
    write_command(tmp_path, "srun", 'printf "%s\\n" "$@"; env | grep -E "^(ARTIFACTS|NNODES|MASTER_)"')
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CONTAINER": container,
    }
    ended = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), "my.toml", "--stages", "doctor"],
        env=os.environ | slurm,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    asked = ended.stdout.splitlines()
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--mpi=none"} <= set(asked)
    assert [line for line in asked if line.startswith("--container-image")] == (
        [f"--container-image={container}"] if container else []
    )
    assert asked[-7:-4] == ["my.toml", "--stages", "doctor"]
    assert set(asked[-4:]) == {
        f"ARTIFACTS={tmp_path}/artifacts/41234",
        "NNODES=2",
        "MASTER_ADDR=first",
        "MASTER_PORT=21234",
    }


def slurm_is_missing() -> str:
    if shutil.which("sbatch") is None:
        return "no Slurm here"
    try:
        subprocess.run(["sinfo"], capture_output=True, check=True, timeout=3)
    except subprocess.SubprocessError:
        return "no Slurm controller answers here"
    return ""


@pytest.mark.xdist_group("launch")
def test_slurm_runs_the_job(tmp_path: Path) -> None:
    reason = slurm_is_missing()
    if reason:
        pytest.skip(reason)
    command = ["sbatch", "--wait", f"--output={tmp_path / 'log'}", str(LAUNCH / "slurm.sbatch"), "--stages", "doctor"]
    ended = subprocess.run(
        command, env=os.environ | {"ARTIFACTS": str(tmp_path)}, cwd=REPOSITORY, capture_output=True, timeout=120
    )
    assert ended.returncode == 0, (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "job.json").read_text())["verdict"] == "green"


MANIFEST = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())


def understood(manifest: dict[str, Any]) -> bool:
    """Whether the JobSet API (Kubeflow's models of it and of the pods in it) knows every key. Raises on wrong types."""
    jobset = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest))
    assert jobset is not None
    return jobset.to_dict() == manifest


def test_jobset_follows_its_schema() -> None:
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert understood(MANIFEST)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "replicatedJobs", 0, "replica"), 1),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "container"), []),
        (("spec", "replicatedJobs", 0, "template", "spec", "parallelism"), "one"),
    ],
)
def test_schema_refuses_what_the_manifest_must_not_say(place: tuple[Any, ...], value: object) -> None:
    manifest = copy.deepcopy(MANIFEST)
    *path, key = place
    part = manifest
    for step in path:
        part = part[step]
    part[key] = value
    try:
        assert not understood(manifest)
    except ValueError as error:
        assert key in str(error)  # noqa: PT017 (a wrong type is refused by the model, an unknown key dropped)


def test_jobset_agrees_with_itself_and_the_scripts() -> None:
    replicated = MANIFEST["spec"]["replicatedJobs"][0]
    job = replicated["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    name = MANIFEST["metadata"]["name"]
    assert job["parallelism"] == job["completions"] == int(variables["NNODES"])
    assert variables["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "ARTIFACTS"} <= variables.keys()
    assert (REPOSITORY / container["command"][0]).is_file()
    assert all((REPOSITORY / config).is_file() for config in container["args"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in job["template"]["spec"]["volumes"]
    }


def test_a_cluster_grants_the_time_that_the_stages_may_take(tmp_path: Path) -> None:
    """Else it ends the job before a stage's own limit does, and there is no report."""
    settings = Settings("c.toml", tmp_path, tmp_path, "cuda", tmp_path, 0.3, None)
    found = [stages.doctor(settings), *stages.following(settings, Hardware("cuda", "some-gpu", 8, 16, 140 << 30))]
    job = MANIFEST["spec"]["replicatedJobs"][0]["template"]["spec"]
    granted = re.search(r"^#SBATCH --time=(\d+):(\d+):00$", (LAUNCH / "slurm.sbatch").read_text(), re.MULTILINE)
    assert granted is not None
    hours, minutes = map(int, granted.groups())
    assert sum(stage.limit_seconds for stage in found) <= min(3600 * hours + 60 * minutes, job["activeDeadlineSeconds"])
