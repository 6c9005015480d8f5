"""The built-in launcher and the conclusions it comes to, with stub bodies; what the environment says of launchers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_stub import collectives, kill_one, raise_one, report

from dcp_decode import cli, scratch
from dcp_decode.config import load_config
from dcp_decode.control.plane import ControlPlane, Peer
from dcp_decode.errors import BAD_INPUT, VERIFIED, WAIT_EXPIRED, WRONG_RESULT, ConfigError, UnsupportedEnvironment
from dcp_decode.forensics.archive import read
from dcp_decode.launcher import detect_launcher
from dcp_decode.records import RankRecord, RankReport, make_plan, read_records
from dcp_decode.results import Conclusion, conclude
from dcp_decode.supervisor import supervise
from dcp_decode.world import check_world

pytestmark = pytest.mark.xdist_group("launch")

STUB = Path(__file__).resolve().parent / "launch_stub.py"
CONTRACT_KEYS = (
    *("schema", "command", "config", "geometry", "seed", "commit", "dirty"),
    *("launcher", "fabric", "route", "family", "device", "versions", "ranks", "process_ids"),
    *("verified", "worst_error", "error_bound", "checked_steps", "digest"),
    *("requests", "steps", "tokens", "acceptance", "stages", "expired_waits"),
)
REPOSITORY = STUB.parent.parent


def launch(
    body: Callable[[ControlPlane], RankReport], size: int, folder: Path, control_deadline: float = 20.0
) -> tuple[Conclusion, dict[int, RankRecord], float]:
    """Run a body as `size` forked ranks: the conclusion, the records, and the seconds it took."""
    plan = make_plan("stub", load_config(None, {"parallel.dcp": size}), "builtin", None)
    started = time.monotonic()
    supervise(body, size, folder, wait_deadline_seconds=0.2, control_deadline_seconds=control_deadline)
    seconds = time.monotonic() - started
    records = read_records(folder)
    return conclude(plan, records), records, seconds


def process_runs(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


def wait_until_gone(process_ids: list[int], seconds: float = 5.0) -> list[int]:
    """The processes that still exist after at most `seconds`."""
    until = time.monotonic() + seconds
    while (left := [process for process in process_ids if process_runs(process)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def test_eight_ranks_start_meet_and_end(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    conclusion, records, seconds = launch(collectives, 8, tmp_path)
    record_property("seconds of eight ranks", seconds)
    assert (conclusion.exit_code, conclusion.error, conclusion.dead_ranks) == (VERIFIED, None, ())
    assert len({record.process_id for record in records.values()}) == 8
    assert conclusion.document["digest"] == "builtin 8"
    assert conclusion.document["verified"] is True
    assert seconds < 20  # forked: about 1 s on two idle cores; spawned ranks would take 10 s


def test_document_has_every_key_of_the_contract(tmp_path: Path) -> None:
    document = launch(collectives, 2, tmp_path)[0].document
    for key in CONTRACT_KEYS:
        assert key in document
    assert document["schema"] == 1
    assert document["ranks"] == 2
    assert document["device"]["architecture"]
    assert document["versions"]["torch"]
    json.dumps(document)


def test_killed_rank_is_named_and_the_others_stop_promptly(tmp_path: Path) -> None:
    conclusion, records, seconds = launch(kill_one, 4, tmp_path)
    assert (conclusion.exit_code, conclusion.dead_ranks) == (WAIT_EXPIRED, (3,))
    assert conclusion.error == f"rank 3 died: process {records[3].process_id} ended by SIGKILL"
    assert seconds < 3
    for rank in range(3):
        assert records[rank].dead_peers.keys() == {"3"}
        assert "rank 3 died" in str(records[rank].error)
        assert {"label": "meeting", "waiting_rank": rank, "source_rank": 3, "stage": "control"} in (
            conclusion.document["expired_waits"]
        )


def test_crashed_rank_is_the_cause_and_keeps_its_traceback(tmp_path: Path) -> None:
    conclusion, records, seconds = launch(raise_one, 4, tmp_path)
    assert (conclusion.exit_code, conclusion.dead_ranks) == (WAIT_EXPIRED, (1,))
    assert conclusion.error == "rank 1 died: KeyError: 'a defect'"
    assert "in raise_one" in str(records[1].traceback)
    assert "stopped: KeyError: 'a defect'" in records[0].dead_peers["1"]
    assert seconds < 3


def test_wrong_result_wins_over_its_consequences(tmp_path: Path) -> None:
    conclusion, _, _ = launch(lambda control: report(verified=False), 2, tmp_path)
    assert conclusion.exit_code == WRONG_RESULT
    assert conclusion.error == "a row left its bound"
    assert conclusion.document["verified"] is False


def test_refusal_of_one_rank_ends_the_group_with_its_line(tmp_path: Path) -> None:
    def refuse_one(control: ControlPlane) -> RankReport:
        if control.rank == 1:
            raise ConfigError("cache.k_scale", 2.0, "on rank 1 must equal rank 0's 1.0")
        control.barrier("agreement")
        return report()

    conclusion, _, _ = launch(refuse_one, 2, tmp_path)
    assert (conclusion.exit_code, conclusion.dead_ranks) == (BAD_INPUT, ())
    assert conclusion.error == "cache.k_scale = 2.0: on rank 1 must equal rank 0's 1.0"


def test_late_rank_is_named_with_the_label(tmp_path: Path) -> None:
    def sleep_one(control: ControlPlane) -> RankReport:
        if control.rank == 1:
            time.sleep(2)
        control.barrier("prefill of step 7")
        return report()

    conclusion, _, _ = launch(sleep_one, 4, tmp_path, control_deadline=0.5)
    assert (conclusion.exit_code, conclusion.dead_ranks) == (WAIT_EXPIRED, ())
    assert "waited 0.5 s at 'prefill of step 7' for rank 1" in str(conclusion.error)


def test_ranks_out_of_step_are_told_apart(tmp_path: Path) -> None:
    conclusion, _, _ = launch(lambda control: (control.barrier(f"step {control.rank}"), report())[1], 2, tmp_path)
    assert conclusion.exit_code == WAIT_EXPIRED
    assert "'step 0'" in str(conclusion.error)
    assert "'step 1'" in str(conclusion.error)


def test_survivors_that_hang_are_terminated_then_killed(tmp_path: Path) -> None:
    def hang(control: ControlPlane) -> RankReport:
        control.barrier("together")
        if control.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if control.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        return report()

    conclusion, records, seconds = launch(hang, 4, tmp_path)
    assert conclusion.dead_ranks == (1,)
    assert [records[rank].outcome for rank in range(4)] == ["terminated", "killed", "terminated", "terminated"]
    assert records[0].error == "told to stop (SIGTERM)"
    assert records[2].error == "ended by the launcher (SIGKILL)"
    assert seconds < 10


def test_ranks_outlive_the_terminal(tmp_path: Path) -> None:
    def hang_up(control: ControlPlane) -> RankReport:
        os.kill(os.getpid(), signal.SIGHUP)
        control.barrier("after the terminal has gone")
        return report()

    conclusion, _, _ = launch(hang_up, 2, tmp_path)
    assert (conclusion.exit_code, conclusion.error) == (VERIFIED, None)


def start_stub(behaviour: str, size: int, output: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """The stub `wait` under the built-in launcher, with the process ids of its ranks."""
    # Its folder of records stays behind if it is killed: not in the machine's.
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(output.parent)}
    process = subprocess.Popen(
        [sys.executable, str(STUB), behaviour, str(size), str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    ranks = [int(word) for word in process.stdout.readline().split()]
    assert len(ranks) == size
    return process, ranks


def test_killed_parent_leaves_no_orphans(tmp_path: Path) -> None:
    process, ranks = start_stub("wait", 4, tmp_path / "out.json")
    assert all(map(process_runs, ranks))
    [folder] = tmp_path.glob(f"{scratch.PREFIX}*")
    make_old(folder)
    scratch.remove_abandoned(tmp_path)
    assert folder.is_dir()  # of a run that lives
    process.kill()
    process.wait()
    assert wait_until_gone(ranks) == []
    scratch.remove_abandoned(tmp_path)
    assert not folder.exists()


def make_old(folder: Path) -> None:
    """As if nobody had touched the folder for long."""
    long_ago = time.time() - 2 * scratch.NEW_SECONDS
    os.utime(folder, (long_ago, long_ago))


def test_a_run_removes_what_killed_runs_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, new, other = (tmp_path / name for name in (f"{scratch.PREFIX}a", f"{scratch.PREFIX}b", "dcp_decode-x"))
    elsewhere = tmp_path / "elsewhere"
    for folder in (left, new, other, elsewhere):
        folder.mkdir()
        (folder / "plan.json").write_text("{}")
    (tmp_path / f"{scratch.PREFIX}link").symlink_to(elsewhere)
    for folder in (left, other, elsewhere):
        make_old(folder)
    with scratch.scratch_folder() as own:
        assert own.is_dir()
        assert not left.exists()
        make_old(own)
        scratch.remove_abandoned(tmp_path)
        assert own.is_dir()
    assert not own.exists()
    # Maybe not locked yet; none of ours; not a folder.
    assert all((folder / "plan.json").is_file() for folder in (new, other, elsewhere))


def test_ranks_that_outlive_their_parent_keep_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told, tell = os.pipe()
    with contextlib.suppress(FileNotFoundError), scratch.scratch_folder() as folder:
        child = os.fork()
        if child == 0:
            os.close(tell)
            os.read(told, 1)
            os._exit(0)
        (kept := tmp_path / f"{scratch.PREFIX}kept").mkdir()
        folder.rename(kept)  # so that its end here doesn't remove it
    make_old(kept)
    scratch.remove_abandoned(tmp_path)
    assert kept.is_dir()
    os.close(tell)
    os.waitpid(child, 0)
    scratch.remove_abandoned(tmp_path)
    assert not kept.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_parent_stops_its_ranks_and_reports(number: signal.Signals, tmp_path: Path) -> None:
    process, ranks = start_stub("wait", 4, tmp_path / "out.json")
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == WAIT_EXPIRED
    assert wait_until_gone(ranks) == []
    archive = tmp_path / "out.forensics.tar.gz"
    assert errors == f"error: told to stop (SIGTERM)\nforensics: {archive}\n"
    document = json.loads(Path(output.splitlines()[-1]).read_text())
    assert [record["outcome"] for record in document["records"]] == ["terminated"] * 4
    assert document["forensics"] == str(archive)
    assert list(read(archive).evidence) == [0, 1, 2, 3]


INTERRUPTED_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "dcp_decode.cli":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has started with &
sys.meta_path.insert(0, Finder())
from dcp_decode.__main__ import main
main()
"""


def test_ctrl_c_during_the_imports_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (WAIT_EXPIRED, "error: told to stop (SIGINT)\n")


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}


def test_launcher_is_detected() -> None:
    assert detect_launcher({}).name == "builtin"
    assert detect_launcher(TORCHRUN | {"RANK": "5"}).rank == 5
    assert detect_launcher(MPI).name == "mpi"
    assert detect_launcher({"PMI_RANK": "1", "PMI_SIZE": "2"}).size == 2


def test_launchers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedEnvironment, match="at once"):
        detect_launcher(TORCHRUN | MPI)
    with pytest.raises(UnsupportedEnvironment, match="MASTER_PORT not"):
        detect_launcher({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"})
    for variables, name in (
        (TORCHRUN | {"RANK": "abc"}, "RANK = 'abc': must be an integer in 0 .. 7"),
        (TORCHRUN | {"RANK": "8"}, "RANK = '8': must be an integer in 0 .. 7"),
        (TORCHRUN | {"WORLD_SIZE": "-8"}, "WORLD_SIZE = '-8': must be an integer in 1 .. "),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT = 'http': must be an integer in 0 .. 65535"),
        (MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE = '': must be an integer in 1 .. "),
    ):
        with pytest.raises(ConfigError, match=re.escape(name)):
            detect_launcher(variables)
    with pytest.raises(UnsupportedEnvironment, match="one process"):
        check_world(detect_launcher(MPI), load_config(None, {"parallel.fabric": "loopback"}))
    with pytest.raises(UnsupportedEnvironment, match=r"mpi started 8 ranks, but parallel.dcp is 4"):
        check_world(detect_launcher(MPI), load_config(None, {"parallel.dcp": 4}))
    check_world(detect_launcher(MPI), load_config())


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("3", 0)])
def test_wrong_world_is_reported_by_rank_0_only(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "REFUSAL_SECONDS", 0.0)
    for name, value in (TORCHRUN | {"RANK": rank, "WORLD_SIZE": "5"}).items():
        monkeypatch.setenv(name, value)
    assert cli.run_command(["run"]) == BAD_INPUT
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("torchrun started 5 ranks")) == ("", lines)


def test_process_identity_sees_zombies_and_reused_ids() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    try:
        assert not Peer("", "", child.pid, started).ended()
        assert Peer("", "", child.pid, started + 1).ended()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped: a zombie
        assert Peer("", "", child.pid, started).ended()
    finally:
        child.kill()
        with contextlib.suppress(ProcessLookupError):
            child.wait()
    assert Peer("", "", child.pid, started).ended()
