"""GPU tests: gating, and a report of every case for `measure_kernels.py`.

With DCP_KERNEL_REPORT set to a path, the session leaves a JSON list there: one entry a test case with its outcome and
the worst error and bound of every verdict it required.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_verdicts: list[dict] = []
_cases: list[dict] = []


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
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "LOCAL_RANK" not in os.environ:
        return "needs torchrun with several ranks (make test-multigpu)"
    import torch

    if torch.cuda.device_count() < size:
        return f"needs a GPU for each of {size} ranks, and {torch.cuda.device_count()} are here"
    return _missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, missing in (("gpu", _missing), ("multigpu", _missing_group)):
        here = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if here else None
        if reason is not None:
            for item in here:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    if "DCP_KERNEL_REPORT" not in os.environ:
        return
    from dcp_decode.verdict import Verdict

    require = Verdict.require

    def record_and_require(verdict: Verdict, label: str) -> None:
        worst = verdict.worst
        _verdicts.append({"label": label, "worst_error": worst.error, "error_bound": worst.bound, "ok": verdict.ok})
        require(verdict, label)

    Verdict.require = record_and_require  # type: ignore[method-assign]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        case = {"test": report.nodeid.rpartition("/")[2], "outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "failed":
            case["error"] = str(report.longrepr)[-2000:]
        _cases.append(case | {"verdicts": list(_verdicts)})
        _verdicts.clear()
        # After every case: a run that is cut short leaves what it has shown.
        path = os.environ.get("DCP_KERNEL_REPORT")
        if path:
            Path(path).write_text(json.dumps(_cases, indent=1) + "\n")
