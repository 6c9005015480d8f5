"""The life of one rank's process, the same under every launcher: connect, run the body, leave a record and evidence.

A body is a function of the control plane that returns a `RankReport`. However it ends, `RankProcess.run` writes the
rank's record, tells the peers, and returns the record.

torchrun and mpirun end survivors with SIGTERM within 0.25 s of a death, often before they have noticed it themselves;
torchrun follows with SIGKILL after 30 s, mpirun after 0.25 s (both measured). So a thread waits for SIGTERM, whatever
the main thread is doing: it writes a record and the evidence at once, then gives the main thread LAST_WORDS_SECONDS: a
host's wait for the dead rank fails by itself meanwhile, and that better record replaces the first. Otherwise it ends
the process: kernels that wait may take longer (`device_steps`), and the first record names the dead as well.
faulthandler has written the main thread's Python stack before that, and on fatal signals all stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from dcp_decode.control.plane import ControlPlane
from dcp_decode.environment import describe_device
from dcp_decode.errors import (
    BAD_INPUT,
    VERIFIED,
    WAIT_EXPIRED,
    WRONG_RESULT,
    DcpDecodeError,
    RankDied,
    WaitFailed,
    WrongResult,
)
from dcp_decode.fabric import shared_files
from dcp_decode.forensics.black_box import black_box
from dcp_decode.forensics.evidence import stacks_path, write_evidence
from dcp_decode.records import Outcome, RankRecord, RankReport, write_record

Body = Callable[[ControlPlane], RankReport]

LAST_WORDS_SECONDS = 0.5  # several looks at the peers (plane.LIVENESS_SECONDS)


class RankProcess:
    """This process as rank `rank`; folder None keeps no record files."""

    def __init__(self, rank: int, folder: Path | None) -> None:
        self.rank = rank
        self.folder = folder
        self.control: ControlPlane | None = None
        self.records: list[RankRecord] = []  # of all ranks, once the group has ended in order
        self._own_record: RankRecord | None = None  # once it stands, SIGTERM doesn't change it
        self._told_record: RankRecord | None = None  # of SIGTERM
        self._failure: Exception | None = None
        self._lock = threading.Lock()  # of the record's file

    def handle_terminate(self) -> None:
        """From now on SIGTERM leaves a record; early, before slow connections. In the main thread."""
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.signal(signal.SIGTERM, lambda *_: None)  # not the default, which would end the process
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        if self.folder is not None:
            stacks = stacks_path(self.folder, self.rank).open("w")  # stays open: faulthandler keeps its descriptor
            faulthandler.enable(stacks)
            # Only of the thread that is interrupted, the main one: the others run on meanwhile, and walking the frames
            # of the control store's, which come and go all the time, has ended a rank with SIGSEGV.
            faulthandler.register(signal.SIGTERM, stacks, all_threads=False, chain=True)
        threading.Thread(target=self._await_terminate, args=(told,), name="SIGTERM", daemon=True).start()

    def run(self, connect: Callable[[], ControlPlane], body: Body) -> RankRecord:
        """Connect and run the body. Never raises: every failure is in the record."""
        try:
            self.control = connect()
            report = body(self.control)
            record = self._finished(report)
            self.records = self.control.all_gather(record, "end")
            failure = trace = None
        except DcpDecodeError as error:
            self._failure = error
            waits = error.expired_waits if isinstance(error, WaitFailed) else []
            worst = {}
            if isinstance(error, WrongResult):
                worst = {"worst_error": error.error, "error_bound": error.bound, "worst_row": error.place}
            failure, trace = str(error), traceback.format_exc()
            died = isinstance(error, RankDied)
            record = self._record(
                "failed", error.exit_code, failure, consequence=died, expired_waits=waits, worst=worst
            )
        except Exception as error:
            self._failure = error
            failure, trace = f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc()
            record = self._record("crashed", WAIT_EXPIRED, failure, traceback=trace)
        # The failure keeps its frames, and what torch made in them, until this process leaves: once a GPU has failed,
        # the destructor of a pinned tensor ends the process (torch 2.11), here before it had said what it knew.
        with self._lock:
            if self._told_record is not None and record.exit_code == BAD_INPUT:
                record = self._told_record  # refused what SIGTERM has taken away, its own shared memory or a peer's
            self._own_record = record
            self._write(record)
        if failure is not None and record.exit_code != BAD_INPUT:
            self._collect(failure, trace)
        if failure is not None:
            shared_files.remove_abandoned()  # of the peer whose death this may be about
        if self.control is not None:
            # A rank that stops because of a dead peer leaves quietly, so that the blame stays with that peer.
            self.control.close(None if record.consequence else failure)
        return record

    def _finished(self, report: RankReport) -> RankRecord:
        exit_code, error = _verdict(report)
        return self._record(
            "ok" if exit_code == VERIFIED else "failed",
            exit_code,
            error,
            report=asdict(report),
            device=describe_device(report.device) if self.rank == 0 else None,
        )

    def _record(self, outcome: Outcome, exit_code: int, error: str | None, **details: object) -> RankRecord:
        dead = {} if self.control is None else self.control.dead_peers(at_once=True)
        return RankRecord(
            rank=self.rank,
            process_id=os.getpid(),
            hostname=socket.gethostname(),
            outcome=outcome,
            exit_code=exit_code,
            ended=time.time(),
            error=error,
            dead_peers={str(rank): reason for rank, reason in dead.items()},
            **details,  # type: ignore[arg-type]
        )

    def _write(self, record: RankRecord) -> None:
        if self.folder is not None:
            try:
                write_record(self.folder, record)
            except FileNotFoundError:
                pass  # of a bare launcher, and the conclusion is drawn
            except OSError as error:  # a full disk: without its record this rank counts as one that was killed
                _say(f"rank {self.rank} has no record ({error.strerror}): {record.error or record.outcome}")

    def _collect(self, reason: str, trace: str | None) -> None:
        folder = self.folder
        if folder is None:
            return
        try:
            black_box.collect(self.rank, self.control, reason, trace, lambda evidence: write_evidence(folder, evidence))
        except Exception as error:  # the failure that it is about must reach its end all the same
            _say(f"forensics: rank {self.rank} could not say everything: {error!r}")

    def _await_terminate(self, told: int) -> None:
        while signal.SIGTERM not in os.read(told, 64):
            pass
        leave_at = time.monotonic() + LAST_WORDS_SECONDS
        try:
            self._speak_last()
        except Exception as error:  # whatever it is, this process ends
            _say(f"rank {self.rank} could not say how it ended: {error!r}")
        shared_files.remove_names()  # now: mpirun kills it before its time to leave
        shared_files.remove_abandoned()
        time.sleep(max(0.0, leave_at - time.monotonic()))
        with self._lock:
            if self._own_record is None:
                # Neither the interpreter's exit handlers nor MPI_Finalize: both may wait for peers that are gone.
                leave(WAIT_EXPIRED)

    def _speak_last(self) -> None:
        """The record and the evidence of a rank that is told to stop, if it isn't ending anyway."""
        waits = [] if self.control is None else self.control.waits()
        with self._lock:
            if self._own_record is not None:
                return
            reason = "told to stop (SIGTERM)"
            record = self._record("terminated", WAIT_EXPIRED, reason, consequence=True, expired_waits=waits)
            self._told_record = record
            self._write(record)
        self._collect(reason, None)


def _verdict(report: RankReport) -> tuple[int, str | None]:
    """Exit code and error of a body that came to its end."""
    if report.verified is False:
        return WRONG_RESULT, report.error
    if report.refusals and len(report.refusals) == report.requests["in"]:
        count = len(report.refusals)
        return BAD_INPUT, f"{count} of {count} requests can never run; {report.refusals[0]}"
    return VERIFIED, None


def leave(exit_code: int) -> None:
    """End this process at once, with its output flushed as far as it can be."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe or file
                stream.flush()
    finally:
        os._exit(exit_code)


def _say(line: str) -> None:
    """On standard error, if that can be written: what is said here must stop nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
