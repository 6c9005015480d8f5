"""What a GPU says about the kernels' correctness, in one JSON document: `python tests/gpu/measure_kernels.py OUTPUT`.

Runs `pytest -m gpu` on the kernels' own tests (cases with their worst error, bound and verdict), then small uses under
compute-sanitizer (`sanitizers`). Exit code 0 if all of it is clean. What the kernels take is `dcp-decode
checkpoint`'s to say.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sanitizers import is_clean, sanitize

FOLDER = Path(__file__).parent
# Side by side: tests of times and of several processes don't go together with others on one GPU.
KERNEL_TESTS = ("test_chain.py", "test_sparse.py", "test_stages.py", "test_warpgroup.py")


def run_cases(workers: int, seconds: int) -> dict:
    """The report that `conftest` leaves of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "cases.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), "-m", "gpu"]
        command += ["-o", "faulthandler_timeout=25", *(str(FOLDER / name) for name in KERNEL_TESTS)]
        with contextlib.suppress(subprocess.TimeoutExpired):  # the report then has no exit code
            subprocess.run(command, env=os.environ | {"DCP_KERNEL_REPORT": str(report)}, timeout=seconds, check=False)
        return json.loads(report.read_text()) if report.exists() else {"exit_code": None, "cases": []}


def summary_of(report: dict) -> dict:
    """What the document says of the cases: one entry a test case; an incomplete run is a failed case more."""
    code, cases = report["exit_code"], report["cases"]
    if code != 0:
        error = "no end in its time" if code is None else f"pytest: {code}"
        cases = [*cases, {"test": "all", "outcome": "failed", "error": error, "verdicts": []}]
    verdicts = [verdict for case in cases for verdict in case["verdicts"] if verdict["error_bound"] > 0]
    worst = max(verdicts, key=lambda verdict: verdict["worst_error"] / verdict["error_bound"], default=None)
    failed = [case["test"] for case in cases if case["outcome"] == "failed"]
    return {
        "verified": bool(verdicts) and not failed,
        "worst_error": worst and worst["worst_error"],
        "error_bound": worst and worst["error_bound"],
        "failed": failed,
        "cases": cases,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", help="where the checkout's own history is not at hand")
    parser.add_argument("--cases", type=Path, help="of a run with DCP_KERNEL_REPORT: none is made")
    parser.add_argument("--cases-only", action="store_true", help="no sanitizers")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="pytest processes")
    parser.add_argument("--cases-seconds", type=int, default=300)
    parser.add_argument("--sanitizer-seconds", type=int, default=60)
    arguments = parser.parse_args()
    begin = time.time()
    from dcp_decode import environment
    from dcp_decode.kernels.sparse_config import FAMILY

    commit, dirty = environment.commit()
    document: dict = {
        "schema": 1,
        "command": "tests/gpu/measure_kernels.py",
        "commit": arguments.commit or commit,
        "dirty": None if arguments.commit else dirty,
        "family": FAMILY,
        "fabric": "loopback",
        "device": environment.describe_device("cuda"),
        "versions": environment.versions(),
        "verified": None,
    }

    def write() -> None:
        document["seconds"] = time.time() - begin
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")

    write()
    if arguments.cases is None:
        report = run_cases(arguments.workers, arguments.cases_seconds)
    else:
        report = json.loads(arguments.cases.read_text())
        if report["commit"] != document["commit"]:
            parser.error(f"--cases: of commit {report['commit']}, must be of {document['commit']}")
    document |= summary_of(report)
    write()
    document["sanitizers"] = {} if arguments.cases_only else sanitize(arguments.sanitizer_seconds)
    write()
    error = f"{document['worst_error']} of at most {document['error_bound']}"
    print(f"{len(document['cases'])} cases, {len(document['failed'])} failed; worst error {error}", flush=True)
    print(arguments.output)
    clean = all(map(is_clean, document["sanitizers"].values()))
    return 0 if document["verified"] and clean else 1


if __name__ == "__main__":
    sys.exit(main())
