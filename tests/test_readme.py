"""The README's commands do what it says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("launch")

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()


def shell_commands() -> list[str]:
    """Every line of the README's sh blocks, without its comment."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = (line.partition("#")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


MAKE_COMMANDS = [command for command in shell_commands() if command.startswith("make ")]
RUN_COMMANDS = [command for command in shell_commands() if not command.startswith("make ")]


def test_readme_has_both_kinds_of_commands() -> None:
    assert {"make run", "make test"} <= set(MAKE_COMMANDS)
    assert any(command.startswith("launch/torchrun.sh ") for command in RUN_COMMANDS)
    assert any(command.startswith("launch/mpirun.sh ") for command in RUN_COMMANDS)


@pytest.mark.parametrize("command", MAKE_COMMANDS)
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
