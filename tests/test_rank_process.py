"""A rank's last words: told to stop with a full disk, with output that can't be written, or over bad input."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_decode.control.plane import ControlPlane
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.errors import BAD_INPUT, WAIT_EXPIRED, ConfigError, DcpDecodeError
from dcp_decode.fabric import shared_files
from dcp_decode.forensics.evidence import stacks_path
from dcp_decode.rank_process import LAST_WORDS_SECONDS, RankProcess, leave
from dcp_decode.records import RankReport, read_records

pytestmark = pytest.mark.xdist_group("processes")


def forked(life: Callable[[], object]) -> tuple[int, int]:
    """A child with that life, and the end of a pipe with what it says on standard error."""
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.stderr = os.fdopen(say, "w")
            life()
        finally:
            os._exit(99)
    os.close(say)
    return child, said


def ended(child: int, said: int, seconds: float = 5.0) -> tuple[int | None, str]:
    """The exit code (None: it had to be killed after `seconds`) and what was said."""
    until = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    exit_code = os.waitstatus_to_exitcode(done[1]) if done[0] else None
    if exit_code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(said) as text:
        return exit_code, text.read()


def test_a_full_disk_keeps_no_rank_that_is_told_to_stop(tmp_path: Path) -> None:
    def life() -> None:
        process = RankProcess(3, tmp_path)
        process.handle_terminate()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        (tmp_path / "ready").touch()
        process.run(SoloControlPlane, lambda _: time.sleep(60))

    child, said = forked(life)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    started = time.monotonic()
    os.kill(child, signal.SIGTERM)
    exit_code, errors = ended(child, said)
    assert exit_code == WAIT_EXPIRED
    assert time.monotonic() - started < 2 * LAST_WORDS_SECONDS + 1
    assert errors.startswith("rank 3 has no record (File too large): told to stop (SIGTERM)\n")
    assert read_records(tmp_path) == {}


def test_told_to_stop_a_rank_walks_the_stack_of_its_main_thread_only(tmp_path: Path) -> None:
    """The frames of others come and go meanwhile: rarely, but then that ends the process by SIGSEGV."""

    def life() -> None:
        process = RankProcess(0, tmp_path)
        process.handle_terminate()
        (tmp_path / "ready").touch()
        process.run(SoloControlPlane, lambda _: time.sleep(60))

    child, said = forked(life)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    assert ended(child, said)[0] == WAIT_EXPIRED
    stacks = stacks_path(tmp_path, 0).read_text()
    assert stacks.count("most recent call first") == 1
    assert "in life" in stacks


def test_a_full_disk_hides_no_failure(tmp_path: Path) -> None:
    def body(_: ControlPlane) -> RankReport:
        raise KeyError("a defect")

    def life() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        leave(RankProcess(0, tmp_path).run(SoloControlPlane, body).exit_code)

    exit_code, errors = ended(*forked(life))
    assert exit_code == WAIT_EXPIRED
    assert "rank 0 has no record (File too large): KeyError: 'a defect'\n" in errors


def test_a_rank_leaves_with_output_that_cannot_be_written() -> None:
    def life() -> None:
        sys.stdout = open("/dev/full", "w")  # noqa: SIM115
        sys.stdout.write("kept until it is flushed")
        leave(7)

    assert ended(*forked(life)) == (7, "")


def test_bad_input_leaves_no_evidence(tmp_path: Path) -> None:
    def body(_: ControlPlane) -> RankReport:
        raise ConfigError("cache.k_scale", 2.0, "must be 1.0")

    assert RankProcess(0, tmp_path).run(SoloControlPlane, body).exit_code == BAD_INPUT
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


def test_a_refusal_after_sigterm_is_a_consequence_of_that(tmp_path: Path) -> None:
    def body(_: ControlPlane) -> RankReport:
        os.kill(os.getpid(), signal.SIGTERM)
        while 1 not in read_records(tmp_path):
            time.sleep(0.001)
        raise DcpDecodeError("rank 0's shared memory can't be mapped")

    def life() -> None:
        process = RankProcess(1, tmp_path)
        process.handle_terminate()
        leave(process.run(SoloControlPlane, body).exit_code)

    assert ended(*forked(life))[0] == WAIT_EXPIRED
    assert [record.error for record in read_records(tmp_path).values()] == ["told to stop (SIGTERM)"]


def test_a_rank_that_fails_removes_the_shared_memory_of_a_killed_peer(tmp_path: Path) -> None:
    child, said = forked(
        lambda: (shared_files.create(shared_files.SHARED_MEMORY), os.kill(os.getpid(), signal.SIGKILL))
    )
    assert ended(child, said)[0] == -signal.SIGKILL
    [left] = shared_files.SHARED_MEMORY.glob(f"{shared_files.PREFIX}{child}-*")

    def body(_: ControlPlane) -> RankReport:
        raise KeyError("over the death of its peer")

    RankProcess(0, tmp_path).run(SoloControlPlane, body)
    assert not left.exists()
