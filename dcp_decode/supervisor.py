"""The built-in launcher: D rank processes by fork, one supervisor that outlives them all.

torch is imported once, before the fork, so that eight ranks are up in about 0.3 s (spawn: 10 s on 2 cores). The
store's listening socket is bound before the fork too: children connect to it at once, while the parent, still without
threads when it forks, starts serving it after.

No orphans: a child dies with its parent (PR_SET_PDEATHSIG), however that ends. When a rank ends badly the others get
`grace_seconds` to find out by themselves and say for whom they waited, then SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from dcp_decode.control.plane import ControlPlane
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.control.store import StoreControlPlane
from dcp_decode.errors import WAIT_EXPIRED
from dcp_decode.fabric import shared_files
from dcp_decode.rank_process import Body, RankProcess, leave
from dcp_decode.records import Outcome, RankRecord, read_records, write_record

PR_SET_PDEATHSIG = 1
SURVIVORS_GRACE_SECONDS = 1.0  # beyond the deadline of a wait: to raise, write the record and leave
TERMINATE_SECONDS = 2.0  # from SIGTERM to SIGKILL
WATCHED = frozenset({signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def supervise(
    body: Body, processes: int, folder: Path, *, wait_deadline_seconds: float, control_deadline_seconds: float
) -> bool:
    """Run the body as `processes` ranks; returns when all have ended and every one has a record in `folder`.

    True if this process was told to stop, which ranks that were ending anyway don't say.
    """
    torch.set_num_threads(1)  # also: a parent with no thread pool is safe to fork
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(processes)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=control_deadline_seconds)

    def open_store() -> torch.distributed.Store:
        return torch.distributed.TCPStore("127.0.0.1", port, None, False, timeout=timeout, wait_for_workers=False)

    def connect(rank: int) -> ControlPlane:
        if processes == 1:
            return SoloControlPlane()
        return StoreControlPlane(
            "builtin", "the launcher's store", open_store, rank, processes, control_deadline_seconds
        )

    parent = os.getpid()
    with _blocked_signals() as previous:
        children: dict[int, int] = {}  # process id -> rank
        try:
            for rank in range(processes):
                child = os.fork()
                if child == 0:
                    _become_rank(parent, previous, rank, folder, lambda rank=rank: connect(rank), body)
                children[child] = rank
            # The host of the store; its destructor stops serving, so it must live until the ranks have ended.
            store = torch.distributed.TCPStore(
                "127.0.0.1", port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            watch = _Watch(children, folder, wait_deadline_seconds + SURVIVORS_GRACE_SECONDS)
            watch.until_all_ended()
            del store
            return watch.told_to_stop or signal.sigtimedwait(WATCHED - {signal.SIGCHLD}, 0) is not None
        finally:
            for child in children:  # only after an error of the supervisor's own are there any left
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
            shared_files.remove_abandoned()  # of ranks that had to be killed


@contextlib.contextmanager
def _blocked_signals() -> Iterator[set[signal.Signals]]:
    """Signals that the supervisor takes with sigtimedwait instead of by handlers; yields the mask before."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        yield {signal.Signals(number) for number in previous}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _become_rank(parent, previous, rank, folder, connect, body) -> None:  # type: ignore[no-untyped-def]
    """The child's whole life; never returns."""
    exit_code = WAIT_EXPIRED
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request took effect
            os._exit(WAIT_EXPIRED)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        process = RankProcess(rank, folder)
        process.handle_terminate()
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        exit_code = process.run(connect, body).exit_code
    finally:
        leave(exit_code)


class _Watch:
    """The supervisor's loop over its children: who has ended, how, and what the others have left."""

    def __init__(self, children: dict[int, int], folder: Path, grace_seconds: float) -> None:
        self.children = children
        self.folder = folder
        self.grace_seconds = grace_seconds
        self.told_to_stop = False
        self.terminate_at: float | None = None
        self.kill_at: float | None = None

    def until_all_ended(self) -> None:
        while self.children:
            received = signal.sigtimedwait(WATCHED, self._patience())
            if received is not None and received.si_signo != signal.SIGCHLD:
                self.told_to_stop = True
                self.terminate_at = time.monotonic()  # no grace
            self._reap()
            now = time.monotonic()
            if self.terminate_at is not None and now >= self.terminate_at and self.kill_at is None:
                self.kill_at = now + TERMINATE_SECONDS
                self._send(signal.SIGTERM)
            elif self.kill_at is not None and now >= self.kill_at:
                self._send(signal.SIGKILL)

    def _patience(self) -> float:
        """Seconds to sleep; SIGCHLD wakes earlier, the tenth of a second is for one that another thread took."""
        due = self.kill_at if self.kill_at is not None else self.terminate_at
        return 0.1 if due is None else min(0.1, max(0.0, due - time.monotonic()))

    def _send(self, number: signal.Signals) -> None:
        for child in self.children:
            os.kill(child, number)  # not reaped yet, so the process id is still the child's

    def _reap(self) -> None:
        for child in list(self.children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended == 0:
                continue
            rank = self.children.pop(child)
            exit_code = os.waitstatus_to_exitcode(status)
            if exit_code != 0 and self.terminate_at is None:
                self.terminate_at = time.monotonic() + self.grace_seconds
            if rank not in read_records(self.folder):
                write_record(self.folder, self._record_for(rank, child, exit_code))

    def _record_for(self, rank: int, process_id: int, exit_code: int) -> RankRecord:
        """The record of a rank that left none; negative exit codes are signals."""
        ours = self.kill_at is not None and exit_code in (-signal.SIGTERM, -signal.SIGKILL)
        reason = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        outcome: Outcome = "terminated" if ours else "killed"
        error = f"ended by the launcher ({reason})" if ours else f"process {process_id} ended by {reason}"
        return RankRecord(
            rank, process_id, socket.gethostname(), outcome, WAIT_EXPIRED, time.time(), error, consequence=ours
        )
