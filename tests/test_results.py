"""The first cause of a failed run, out of the ranks' records; documents that can't be written."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from launch_stub import report

from dcp_decode.cli import run_command
from dcp_decode.config import load_config
from dcp_decode.errors import BAD_INPUT, WAIT_EXPIRED, WRONG_RESULT, ConfigError
from dcp_decode.mailbox import Stage
from dcp_decode.presentation import publish
from dcp_decode.records import RankRecord, make_plan, write_plan
from dcp_decode.results import STAGE_ORDER, NotWritten, conclude, require_writable, write_document


def expired(rank: int, source: int, stage: str, use: int, ended: float) -> RankRecord:
    wait = {"stage": stage, "waiting_rank": rank, "source_rank": source, "use": use}
    error = f"rank {rank} waited for rank {source}"
    return RankRecord(rank, 100 + rank, "host", "failed", 3, ended, error, expired_waits=[wait])


def test_stage_order_is_that_of_the_mailbox_stages() -> None:
    assert tuple(stage.name for stage in Stage) == STAGE_ORDER


def test_the_least_advanced_wait_is_the_cause_whoever_reports_first() -> None:
    plan = make_plan("run", load_config(None, {"parallel.dcp": 4}), "builtin", None)
    records = [
        expired(0, 1, "MERGE", 4, ended=1.0),
        expired(1, 3, "SPARSE", 4, ended=2.0),
        expired(2, 0, "TOPK", 5, ended=0.5),
        expired(3, 1, "MERGE", 4, ended=3.0),
    ]
    conclusion = conclude(plan, dict(enumerate(records)))
    assert conclusion.error == "rank 1 waited for rank 3"
    assert conclusion.exit_code == 3
    # Negative control: with the waits unknown, the earliest record is blamed.
    blind = [RankRecord(r.rank, r.process_id, r.hostname, "failed", 3, r.ended, r.error) for r in records]
    assert conclude(plan, dict(enumerate(blind))).error == "rank 2 waited for rank 0"


def test_a_killed_rank_comes_before_those_that_waited_for_it() -> None:
    plan = make_plan("run", load_config(None, {"parallel.dcp": 2}), "builtin", None)
    conclusion = conclude(plan, {0: expired(0, 1, "SPARSE", 0, ended=1.0)})
    assert conclusion.dead_ranks == (1,)
    assert conclusion.error is not None
    assert conclusion.error.startswith("rank 1 died")


@pytest.mark.parametrize("exit_code", [WRONG_RESULT, BAD_INPUT])
def test_a_typed_failure_comes_before_the_deaths_that_it_brings(exit_code: int) -> None:
    """torchrun and mpirun end the other ranks when the first one leaves, some before they can leave a record."""
    plan = make_plan("run", load_config(None, {"parallel.dcp": 2}), "builtin", None)
    refused = RankRecord(1, 101, "host", "failed", exit_code, 5.0, "cache.pages = 0")
    conclusion = conclude(plan, {1: refused})
    assert (conclusion.exit_code, conclusion.error, conclusion.dead_ranks) == (exit_code, "cache.pages = 0", (0,))


@pytest.mark.parametrize("numbers", [{}, {"worst_error": 0.5, "error_bound": 0.25, "worst_row": "step 1, row 2"}])
def test_a_wrong_result_was_checked(numbers: dict[str, object]) -> None:
    plan = make_plan("run", load_config(None, {"parallel.dcp": 2}), "builtin", None)
    wrong = RankRecord(1, 101, "host", "failed", WRONG_RESULT, 5.0, "row 2 is wrong", worst=numbers)
    document = conclude(plan, {0: expired(0, 1, "MERGE", 4, ended=1.0), 1: wrong}).document
    assert document["verified"] is False
    assert {key: document[key] for key in ("worst_error", "error_bound", "worst_row")} == {
        "worst_error": None, "error_bound": None, "worst_row": None, **numbers
    }  # fmt: skip
    refused = RankRecord(1, 101, "host", "failed", BAD_INPUT, 5.0, "cache.pages = 0")
    assert conclude(plan, {1: refused}).document["verified"] is None


def test_a_wrong_result_of_rows_that_nobody_checked_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a soak whose digests differ, with the oracle off."""
    plan = make_plan("soak", load_config(None, {"parallel.dcp": 2}), "builtin", "/dev/null")
    unchecked = asdict(replace(report(verified=None), worst_error=None, error_bound=None))
    ranks = {rank: RankRecord(rank, 100, "host", "ok", 0, 5.0, report=unchecked) for rank in range(2)}
    conclusion = conclude(plan, ranks)
    publish(replace(conclusion, document=conclusion.document | {"verified": False}), plan)
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "verified" in line] == [
        ["verified", "NO,", "1", "steps"]
    ]


@pytest.mark.parametrize(("options", "error"), [(["--stopped"], "told to stop"), ([], "rank 0 died: ")])
def test_ranks_that_were_stopped_before_they_started_are_not_blamed(
    options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path, make_plan("run", load_config(), "torchrun", str(tmp_path / "run.json")))
    assert run_command(["conclude", str(tmp_path), *options]) == WAIT_EXPIRED
    assert capsys.readouterr().err.startswith(f"error: {error}")


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_plan_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert run_command(["conclude", str(tmp_path)]) == BAD_INPUT
    assert capsys.readouterr().err == f"error: no plan of a run in {tmp_path} (it is damaged)\n"


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_a_damaged_record_is_that_of_a_rank_that_left_none(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path, make_plan("run", load_config(), "torchrun", str(tmp_path / "run.json")))
    (tmp_path / "rank-0.json").write_text(text)
    assert run_command(["conclude", str(tmp_path)]) == WAIT_EXPIRED
    assert "error: rank 0 died: its process ended without a record\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("file/run.json", "Not a directory"),
        ("loop/run.json", "Too many levels of symbolic links"),
        (f"{'x' * 300}/run.json", "File name too long"),
        ("", "is a folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_run(
    output: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    prepare = ["run", "--prepare", str(tmp_path), "--launcher", "torchrun"]
    for command in (prepare, ["soak"], ["compare", "absent.json", "absent.json"]):
        assert run_command([*command, "--output", output]) == BAD_INPUT
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: --output = ")
        assert captured.err.endswith(f"must be a file that can be written ({reason})\n")


def test_an_output_that_can_be_written_is_allowed_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for output in ("new/folder/run.json", "run.json"):
        require_writable(str(tmp_path / output))
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="is read-only"):
        require_writable(str(tmp_path / "run.json"))


@pytest.mark.parametrize("before", [None, "an earlier run's"])
def test_half_a_document_is_not_left(before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(path: Path, text: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output = tmp_path / "run.json"
    if before is not None:
        output.write_text(before)
    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(NotWritten, match="No space left on device"):
        write_document({"exit_code": 0, "error": None}, str(output), 0.0)
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_a_file_that_may_not_be_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may be: a user's own."""
    output = tmp_path / "run.json"
    output.write_text("kept")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != output)  # root may write anywhere
    for refused, write in (
        (ConfigError, lambda: require_writable(str(output))),
        (NotWritten, lambda: write_document({"exit_code": 0, "error": None}, str(output), 0.0)),
    ):
        with pytest.raises(refused):
            write()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} is read-only"):
        require_writable(str(output))


def test_a_link_to_a_document_stays_one(tmp_path: Path) -> None:
    (tmp_path / "latest.json").symlink_to("run.json")
    for digest in ("a", "b"):
        write_document({"digest": digest}, str(tmp_path / "latest.json"), 0.0)
        assert json.loads((tmp_path / "run.json").read_text()) == {"digest": digest}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "run.json"]


@pytest.mark.parametrize(
    ("document", "exit_code", "start"),
    [
        ({"exit_code": 0, "error": None}, BAD_INPUT, "--output = '/dev/full'"),
        ({"exit_code": WAIT_EXPIRED, "error": "rank 1 died"}, WAIT_EXPIRED, "rank 1 died; and --output = '/dev/full'"),
    ],
)
def test_a_full_disk_hides_no_failure(document: dict[str, object], exit_code: int, start: str) -> None:
    with pytest.raises(NotWritten, match="No space left on device") as refusal:
        write_document(document, "/dev/full", 0.0)
    assert refusal.value.exit_code == exit_code
    assert str(refusal.value).startswith(start)
