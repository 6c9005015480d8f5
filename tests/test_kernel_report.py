"""The report that a session of GPU tests leaves, and what `gpu/measure_kernels.py` makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from measure_kernels import FOLDER, summary_of


def case(outcome: str = "passed") -> dict:
    verdict = {"label": "rows", "worst_error": 1.0, "error_bound": 2.0, "ok": True}
    return {"test": "test_a", "outcome": outcome, "seconds": 1.0, "verdicts": [verdict]}


@pytest.mark.parametrize(
    ("exit_code", "cases", "failed"),
    [
        (0, [case()], []),
        (None, [case()], ["all"]),
        (2, [case()], ["all"]),
        (1, [case("failed")], ["test_a", "all"]),
    ],
)
def test_cases_that_fail_or_are_cut_short_are_not_verified(exit_code, cases, failed):
    summary = summary_of({"exit_code": exit_code, "cases": cases})
    assert (summary["failed"], summary["verified"]) == (failed, not failed)
    assert (summary["worst_error"], summary["error_bound"]) == (1.0, 2.0)


def test_no_verdict_verifies_nothing():
    assert summary_of({"exit_code": 0, "cases": [case() | {"verdicts": []}]})["verified"] is False


def test_a_session_leaves_its_exit_code_and_every_case(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER / "test_run_gpu.py")]
    environment = os.environ | {"DCP_KERNEL_REPORT": str(report), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    subprocess.run(command, env=environment, capture_output=True, timeout=120, check=True)
    left = json.loads(report.read_text())
    assert left["exit_code"] == 0
    assert {one["outcome"] for one in left["cases"]} == {"skipped"}
