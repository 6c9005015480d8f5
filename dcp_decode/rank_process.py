"""The life of one rank's process, the same under every launcher: connect, run the body, leave a record.

A body is a function of the control plane that returns a `RankReport`. However it ends, `run_as_rank` writes the
rank's record, tells the peers, and returns the record.

torchrun and mpirun end survivors with SIGTERM within 0.25 s of a death, often before they have noticed it themselves;
torchrun follows with SIGKILL after 30 s, mpirun after 0.25 s (both measured). So a rank told to stop writes a record at
once, then goes on for LAST_WORDS_SECONDS: a wait for the dead rank fails by itself meanwhile, and that better record
replaces the first. Otherwise an alarm ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from dcp_decode.control.plane import ControlPlane
from dcp_decode.environment import describe_device
from dcp_decode.errors import VERIFIED, WAIT_EXPIRED, WRONG_RESULT, DcpDecodeError, RankDied, WaitFailed
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

    def handle_terminate(self) -> None:
        """From now on SIGTERM leaves a record; early, before slow connections."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGALRM, self._leave)

    def run(self, connect: Callable[[], ControlPlane], body: Body) -> RankRecord:
        """Connect and run the body. Never raises: every failure is in the record."""
        try:
            self.control = connect()
            report = body(self.control)
            record = self._finished(report)
            self.records = self.control.all_gather(record, "end")
            failure = None
        except DcpDecodeError as error:
            waits = error.expired_waits if isinstance(error, WaitFailed) else []
            failure = str(error)
            record = self._record(
                "failed", error.exit_code, failure, consequence=isinstance(error, RankDied), expired_waits=waits
            )
        except Exception as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())}"
            record = self._record("crashed", WAIT_EXPIRED, failure, traceback=traceback.format_exc())
        self._write(record)
        if self.control is not None:
            # A rank that stops because of a dead peer leaves quietly, so that the blame stays with that peer.
            self.control.close(None if record.consequence else failure)
        return record

    def _finished(self, report: RankReport) -> RankRecord:
        wrong = report.verified is False
        return self._record(
            "failed" if wrong else "ok",
            WRONG_RESULT if wrong else VERIFIED,
            f"wrong result: error {report.worst_error} is above its bound {report.error_bound}" if wrong else None,
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
        self._own_record = record
        if self.folder is not None:
            write_record(self.folder, record)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        if self._own_record is not None:
            return  # it is ending anyway
        waits = [] if self.control is None else self.control.waits()
        record = self._record(
            "terminated", WAIT_EXPIRED, "told to stop (SIGTERM)", consequence=True, expired_waits=waits
        )
        if self.folder is not None:
            write_record(self.folder, record)
        signal.setitimer(signal.ITIMER_REAL, LAST_WORDS_SECONDS)

    def _leave(self, _number: int, _frame: FrameType | None) -> None:
        if self._own_record is None:
            # Neither the interpreter's exit handlers nor MPI_Finalize: both may wait for peers that are gone.
            leave(WAIT_EXPIRED)


def leave(exit_code: int) -> None:
    """End this process at once, with its output flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
