"""What `gpu/sanitizers.py` lets through of a racecheck report, and what it doesn't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from sanitizers import CHECKS, CLEAN, FOLDER, is_clean, judge_clean, judge_multicast, judge_unknown_order


def hazard(
    kind: str = "WAR",
    first: str = "Read Thread (129,0,0) (block rank 2)",
    second: str = "Write Thread (0,0,0) (block rank 0)",
    place: str = "kernel+0x46f0",
) -> str:
    """As racecheck lists it."""
    return (
        f"========= Error: Potential {kind} hazard detected at __shared__ 0x2005b10 in block (0,2,0) :\n"
        f"=========     {first} at kernel+0x3ff0\n"
        f"=========     {second} at {place}\n"
        "=========     Current Value : 0, Incoming Value : ?\n"
        "========= \n"
    )


def report(*hazards: str, errors: int | None = None, warnings: int = 0) -> str:
    count = len(hazards) if errors is None else errors
    summary = f"========= RACECHECK SUMMARY: {len(hazards)} hazards displayed ({count} errors, {warnings} warnings)\n"
    return "========= COMPUTE-SANITIZER\n" + "".join(hazards) + summary


COPY = hazard()
OTHERS_COPY = hazard(first="Read Thread (20,0,0) (block rank 1)", second="Write Thread (320,0,0) (block rank 3)")


def test_copies_between_head_groups_are_let_through() -> None:
    verdict = judge_multicast(report(COPY, OTHERS_COPY))
    assert is_clean(verdict)
    assert "2 bytes" in verdict
    assert judge_multicast(report()) == CLEAN


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(report(COPY, hazard("RAW")), id="read-after-write"),
        pytest.param(report(COPY, hazard(second="Write Thread (0,0,0) (block rank 2)")), id="own-copy"),
        pytest.param(report(COPY, hazard(second="Write Thread (0,0,0) (block rank 1)")), id="peer-of-other-keys"),
        pytest.param(report(COPY, hazard(second="Read Thread (0,0,0) (block rank 0)")), id="no-write"),
        pytest.param(report(COPY, hazard(place="kernel+0x4700")), id="two-writers"),
        pytest.param(report(COPY, hazard(second="Write Thread (0,0,0)")), id="no-rank"),
        pytest.param(report(COPY, errors=2), id="not-all-listed"),
        pytest.param(report(COPY, warnings=1), id="warning"),
        pytest.param("a traceback", id="no-summary"),
    ],
)
def test_nothing_else_is_let_through(found: str) -> None:
    assert not is_clean(judge_multicast(found))


def test_an_order_that_racecheck_has_learnt_ends_the_exception() -> None:
    assert is_clean(judge_unknown_order(report(COPY)))
    assert not is_clean(judge_unknown_order(report()))
    assert not is_clean(judge_unknown_order("a traceback"))


def test_a_copy_is_let_through_where_it_is_expected_only() -> None:
    assert judge_clean(report(COPY)) != CLEAN
    assert judge_clean(report()) == CLEAN
    assert judge_clean("========= ERROR SUMMARY: 0 errors\n") == CLEAN
    assert judge_clean("========= ERROR SUMMARY: 10 errors\n") != CLEAN
    assert [check.name for check in CHECKS if check.judge is judge_multicast] == ["racecheck, multicast"]


def test_a_tool_that_fails_is_not_clean_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"{report()}File {FOLDER}/case.py, {sys.prefix}/lib/torch.py"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, said, ""))
    verdicts = [check.run("compute-sanitizer", seconds=1) for check in CHECKS]
    assert not any(map(is_clean, verdicts))
    assert {verdict.partition("File ")[2] for verdict in verdicts} == {"tests/gpu/case.py, lib/torch.py"}
