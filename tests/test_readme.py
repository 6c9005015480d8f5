"""The README's commands do what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from dcp_decode.config import load_config
from dcp_decode.errors import ConfigError
from dcp_decode.trace import read_trace
from dcp_decode.waits import MailboxTimeout, Wait

pytestmark = pytest.mark.xdist_group("launch")

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()


def shell_blocks() -> list[str]:
    """The README's sh blocks."""
    return re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The lines of a block, without their comments."""
    lines = (line.partition("#")[0].strip() for line in block.splitlines())
    return [line for line in lines if line]


CLUSTER = next(block for block in shell_blocks() if "git clone" in block)
COMMANDS = [command for block in shell_blocks() if block != CLUSTER for command in commands(block)]
MAKE_COMMANDS = [command for command in COMMANDS if command.startswith("make ")]
RUN_COMMANDS = [command for command in COMMANDS if " run " in command]


def test_readme_has_every_kind_of_command() -> None:
    assert {"make run", "make test"} <= set(MAKE_COMMANDS)
    assert any(command.startswith("launch/torchrun.sh ") for command in RUN_COMMANDS)
    assert any(command.startswith("launch/mpirun.sh ") for command in RUN_COMMANDS)
    others = [command for command in COMMANDS if command not in MAKE_COMMANDS + RUN_COMMANDS]
    assert others == [".venv/bin/dcp-decode doctor configs/smoke.toml"]  # tests/test_doctor.py runs it


def test_errors_read_as_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = ({"timestamp": 0, "input_length": length, "output_length": 1} for length in (1, -4))
    Path("trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [good] * 6 + [bad]))
    with pytest.raises(ConfigError) as geometry:
        load_config(None, {"parallel.dcp": 3})
    with pytest.raises(ConfigError) as line:
        list(read_trace("trace.jsonl"))
    waited = Wait("SPARSE", 0, 3, 0, 36, 0, 12, -1, 0, 0)
    for error in (geometry.value, line.value, MailboxTimeout([waited], 2.0)):
        assert f"\nerror: {error}\n" in README


@pytest.mark.parametrize("command", [*MAKE_COMMANDS, "make install"])
def test_make_target_exists(command: str) -> None:
    # Not run: `make test` is what runs this test, and `make run` is the same as the commands below.
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=REPOSITORY, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", RUN_COMMANDS)
def test_run_command_verifies(command: str, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    # One step is enough to see that the command works; the last of two --max-steps counts.
    arguments = [*shlex.split(command), "--max-steps", "1", "--output", str(output)]
    run = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(output)
    document = json.loads(output.read_text())
    assert document["verified"] is True
    assert document["ranks"] == 8


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="clones the repository, which this is no checkout of")
def test_five_commands_lead_from_clone_to_a_green_job(tmp_path: Path) -> None:
    assert len(commands(CLUSTER)) == 5
    # `make install` takes this environment instead of making one, and the job runs its first stage.
    (tmp_path / "make").write_text(f'#!/bin/sh\ntest "$1" = install && ln -s "{REPOSITORY / ".venv"}" .venv\n')
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {
        "REPOSITORY": str(REPOSITORY),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "STAGES": "doctor",
    }
    ended = subprocess.run(
        ["bash", "-euc", CLUSTER], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    artifacts = tmp_path / "dcp_decode" / "artifacts"
    assert ended.stdout.splitlines()[-1] == str(artifacts / "job.json")
    assert json.loads((artifacts / "job.json").read_text())["verdict"] == "green"
    assert (artifacts / "index.html").is_file()
