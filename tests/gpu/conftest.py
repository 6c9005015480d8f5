"""GPU tests: gating, and a report of every case for `measure_kernels.py`.

With DCP_KERNEL_REPORT set to a path, the session leaves JSON there: its commit, its exit code once it has ended, and an
entry for every test case, with its outcome and the worst error and bound of every verdict it required. Under xdist the
workers' verdicts travel with their reports.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from dcp_decode import environment

sys.path.insert(0, str(Path(__file__).parent))
# Failures in these show their values too.
pytest.register_assert_rewrite("fault_case", "sparse_cases", "sparse_rank", "stage_group")

REPORT = os.environ.get("DCP_KERNEL_REPORT")
VERDICTS = "verdicts"  # of a case, among the properties of its report
_verdicts: list[dict] = []
_cases: list[dict] = []
_report: dict = {"commit": environment.commit()[0], "exit_code": None, "cases": _cases}


def _missing() -> str | None:
    """Why the GPU tests can't run here, or None."""
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if torch.cuda.get_device_capability()[0] < 9:
        return "needs a GPU of compute capability 9.0 or later"
    try:
        import cutlass  # noqa: F401
    except ImportError:
        return "needs nvidia-cutlass-dsl"
    return None


def _missing_group() -> str | None:
    """Why the tests of several GPUs can't run here, or None."""
    import torch

    from dcp_decode.launcher import detect_launcher

    size = detect_launcher(os.environ).size
    if size == 1:
        return "needs torchrun or mpirun with several ranks (make test-multigpu)"

    if torch.cuda.device_count() < size:
        return f"needs a GPU for each of {size} ranks, and {torch.cuda.device_count()} are here"
    return _missing()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Workers of xdist share the cores that each one's tensor operations would take."""
    import torch

    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, missing in (("gpu", _missing), ("multigpu", _missing_group)):
        here = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if here else None
        if reason is not None:
            for item in here:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("RANK", "0") != "0":  # of torchrun's ranks, one writes the JUnit XML
        config.option.xmlpath = None
    if REPORT is None:
        return
    from dcp_decode.verdict import Verdict

    require = Verdict.require

    def record_and_require(verdict: Verdict, label: str) -> None:
        worst = verdict.worst
        _verdicts.append({"label": label, "worst_error": worst.error, "error_bound": worst.bound, "ok": verdict.ok})
        require(verdict, label)

    Verdict.require = record_and_require  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, pytest.TestReport, object]:
    report = yield
    if REPORT is not None and call.when == "call":
        report.user_properties.append((VERDICTS, list(_verdicts)))
        _verdicts.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORT is None or "PYTEST_XDIST_WORKER" in os.environ:  # the process that started the workers hears of all cases
        return
    if report.when == "call" or report.outcome == "failed" or (report.when == "setup" and report.outcome == "skipped"):
        case = {"test": report.nodeid.rpartition("/")[2], "outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "failed":
            case["error"] = str(report.longrepr)[-2000:]
        _cases.append(case | {VERDICTS: dict(report.user_properties).get(VERDICTS, [])})
        _write_report(REPORT)  # after every case: a run that is cut short leaves what it has shown


def pytest_sessionfinish(exitstatus: int) -> None:
    if REPORT is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        _report["exit_code"] = int(exitstatus)
        _write_report(REPORT)


def _write_report(path: str) -> None:
    Path(path).write_text(json.dumps(_report, indent=1) + "\n")
