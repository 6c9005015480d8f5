"""The stages of a CI job: what they run on which hardware, what they lack, and what they say of their tests."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from job_settings import settings
from torch.distributed.elastic.multiprocessing.api import PContext

from dcp_decode.errors import BAD_INPUT, VERIFIED, WRONG_RESULT
from dcp_decode.job import stages
from dcp_decode.job.runner import GRACE_SECONDS, run_stage
from dcp_decode.job.stages import Hardware, Stage

REPOSITORY = Path(__file__).resolve().parent.parent
TEST_STAGES = ("tests", "gpu", "kernels", "multigpu")
H200 = Hardware("cuda", "nvidia-h200-1-gpu", 1, 16, 140 << 30)


def commands(found: list[Stage]) -> dict[str, str]:
    return {stage.name: " ".join(stage.command) for stage in found}


def test_stages_fit_the_device_and_the_node(tmp_path: Path) -> None:
    on_cpu = stages.following(settings(tmp_path), Hardware("cpu", "cpu-2-cores"))
    assert ("doctor", *commands(on_cpu)) == stages.NAMES
    assert "dcp_decode.checkpoint.cpu" in commands(on_cpu)["checkpoint"]
    assert [stage.name for stage in on_cpu if stage.verifies] == ["group", "mpi"]
    for name in ("group", "mpi"):
        assert "--verify every" in commands(on_cpu)[name]
    assert " -n " not in commands(on_cpu)["tests"]
    assert "no " in on_cpu[-1].skip
    assert f"commit this run's {tmp_path}/checkpoint.json there" in on_cpu[-1].skip
    skipped = {stage.name: stage.skip for stage in on_cpu}
    assert skipped["multigpu"] == "needs several GPUs, and 0 are here"
    assert (skipped["tests"], skipped["gpu"], skipped["kernels"]) == ("", "needs a GPU", "needs a GPU")
    on_gpu = stages.following(settings(tmp_path, inject="slowdown"), dataclasses.replace(H200, gpus=6))
    assert "--nproc-per-node 4 -m pytest " in commands(on_gpu)["multigpu"]
    assert not any(stage.skip for stage in on_gpu[:-1])
    assert " -n 16 tests/gpu" in commands(on_gpu)["kernels"]
    for name in TEST_STAGES:
        assert f" --junit-xml={tmp_path}/{name}.xml " in commands(on_gpu)[name]
    assert "checkpoint configs/latency_checkpoint.toml --quick" in commands(on_gpu)["checkpoint"]
    assert "--slowdown 0.2" in commands(on_gpu)["checkpoint"]
    assert " -n 4 --dist worksteal tests/test_launch" in commands(on_gpu)["tests"]
    assert " -m gpu and alone and not quiet " in commands(on_gpu)["gpu"]
    assert "--inject" not in commands(on_gpu)["group"]
    several = settings(tmp_path / "node-1", shared=tmp_path, nodes=2, node=1)
    assert list(commands(stages.following(several, Hardware()))) == ["group"]
    assert commands([stages.doctor(several)])["doctor"].startswith(f"{REPOSITORY}/launch/torchrun.sh doctor")
    assert stages.doctor(several).environment == {"DCP_DECODE_RECORDS": f"{tmp_path}/records-doctor"}
    for test in (*stages.INTEGRATION_TESTS, stages.GPU_TESTS):
        assert (REPOSITORY / test).exists()


@pytest.mark.parametrize(
    ("hardware", "lacking", "reasons"),
    [
        (H200, {"pytest-xdist"}, {"kernels": "needs pytest-xdist (make install)"}),
        (H200, {"pytest-timeout"}, dict.fromkeys(TEST_STAGES, "needs pytest-timeout (make install)")),
        (
            dataclasses.replace(H200, gpu_bytes=24 << 30),
            set(),
            {"kernels": "needs room for 4 processes of 8 GiB, and here are 16 cores and 24 GiB of GPU memory"},
        ),
        (dataclasses.replace(H200, cores=2), set(), {"kernels": "here are 2 cores and 140 GiB of GPU memory"}),
    ],
)
def test_what_tests_lack_is_their_reason(
    hardware: Hardware, lacking: set[str], reasons: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package in lacking:
            raise importlib.metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = stages.following(settings(tmp_path), dataclasses.replace(hardware, gpus=2))
    skipped = {stage.name: stage.skip for stage in found}
    assert {name for name in TEST_STAGES if skipped[name]} == reasons.keys()
    assert all(reason in skipped[name] for name, reason in reasons.items())
    side_by_side = " -n 4 " in commands(found)["tests"]
    assert side_by_side == (hardware.cores >= 16 and "pytest-xdist" not in lacking)


def pytest_stage(folder: Path, test: str) -> Stage:
    """pytest on one test, as a stage of that folder."""
    (folder / "test_it.py").write_text(f"import pytest\n{test}")
    options = (*stages._pytest(settings(folder), "tests", "not slow"), *stages._failures(settings(folder), "tests"))
    return Stage("tests", (sys.executable, *options, "-c", os.devnull, str(folder / "test_it.py")), 60)


@pytest.mark.parametrize(
    ("test", "exit_code", "text"),
    [
        ("def test_a(): pass\ndef test_b(): pass", VERIFIED, "2 tests passed"),
        (
            "def test_a(): pass\n@pytest.mark.skip(reason='needs a moon')\ndef test_b(): pass",
            VERIFIED,
            "1 test passed, 1 skipped: needs a moon",
        ),
        ("pytest.importorskip('no_such_module', reason='needs it')", BAD_INPUT, "no tests passed, 1 skipped: needs it"),
        ("def test_a(): assert False", WRONG_RESULT, "FAILED "),
    ],
)
def test_tests_say_how_many_ran_and_why_others_did_not(test: str, exit_code: int, text: str, tmp_path: Path) -> None:
    outcome = run_stage(pytest_stage(tmp_path, test), tmp_path)
    assert (outcome.exit_code, outcome.text[: len(text)]) == (exit_code, text)
    assert ElementTree.parse(tmp_path / "tests.xml").getroot().tag == "testsuites"


def test_no_test_ran_under_torchrun_either(tmp_path: Path) -> None:
    """It ends with 1, whatever code its ranks end with."""
    stage = pytest_stage(tmp_path, "@pytest.mark.skip(reason='needs a moon')\ndef test_b(): pass")
    anything_is_1 = "import subprocess, sys; sys.exit(bool(subprocess.call(sys.argv[1:])) or 1)"
    torchrun = dataclasses.replace(stage, command=(sys.executable, "-c", anything_is_1, *stage.command))
    outcome = run_stage(torchrun, tmp_path)
    assert (outcome.exit_code, outcome.text) == (BAD_INPUT, "no tests passed, 1 skipped: needs a moon")


def test_damaged_results_of_tests_are_red(tmp_path: Path) -> None:
    code = f"import sys; open({str(tmp_path / 'tests.xml')!r}, 'w').write('<testsuites><testsuite')"
    outcome = run_stage(Stage("tests", (sys.executable, "-c", code), 60.0), tmp_path)
    assert outcome.exit_code == BAD_INPUT
    assert outcome.text.startswith("tests.xml is damaged (")


def test_torchrun_has_time_to_kill_its_ranks_before_a_stage_is_killed() -> None:
    """With 20 s a rank that ignored SIGTERM was left running; with 40 s it was gone after 30."""
    torchrun_seconds = inspect.signature(PContext.close).parameters["timeout"].default
    assert torchrun_seconds == 30
    assert torchrun_seconds + 5 <= GRACE_SECONDS


def test_files_of_failed_tests_are_artifacts(tmp_path: Path) -> None:
    tests = (
        "def test_a(tmp_path): (tmp_path / 'a').touch()\ndef test_b(tmp_path): (tmp_path / 'b').touch(); assert False"
    )
    assert run_stage(pytest_stage(tmp_path, tests), tmp_path).exit_code == WRONG_RESULT
    assert [path.name for path in (tmp_path / "tests-failures").rglob("[ab]")] == ["b"]
