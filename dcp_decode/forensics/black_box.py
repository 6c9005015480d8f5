"""The flight recorder of a rank's process: where it is, and what it can still say after a failure.

There is one a process, like its signal handlers and faulthandler's file. A run tells it where it stands (two stores a
stage) and which mailboxes to read; `collect` writes the evidence, once:

    at once    position, control words and process states of the peers, traceback: mpirun follows SIGTERM with SIGKILL
               after 0.25 s, so these are on disk before anything that may take longer
    then       the mailboxes, read in a thread that is given READ_SECONDS: a GPU may not answer any more

A GPU's mailboxes are copied on a stream of their own into host memory that was pinned beforehand: neither waits for a
kernel that spins.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dcp_decode.control.plane import ControlPlane, Peer
from dcp_decode.forensics.evidence import (
    ControlWords,
    ExpiredWait,
    MailboxEvidence,
    PeerProcess,
    Position,
    RankEvidence,
)
from dcp_decode.forensics.words import read_control, read_mailbox
from dcp_decode.mailbox import Mailbox

if TYPE_CHECKING:
    from dcp_decode.step import BeforeStage, LayerRun

READ_SECONDS = 1.0
POLL_SECONDS = 0.002
PACKAGES = ("torch", "numpy", "triton", "cutlass", "nvshmem", "mpi4py")

Write = Callable[[RankEvidence], object]


class BlackBox:
    """Position and mailboxes of this process."""

    def __init__(self) -> None:
        self._position = ("start", -1, -1, time.monotonic())
        self._mailboxes: Sequence[Mailbox] = ()
        self._reader: _DeviceReader | None = None
        self._lock = threading.Lock()
        self._collected = False

    def at(self, activity: str, step: int = -1, layer: int = -1) -> None:
        """This process begins something."""
        self._position = (activity, step, layer, time.monotonic())

    def noting(self, step: int, before_stage: BeforeStage | None) -> BeforeStage:
        """A hook for the stages of a step that notes each one, then calls `before_stage`."""

        def note(run: LayerRun[Any], stage: str) -> None:
            self._position = (stage, step, run.layer, time.monotonic())
            if before_stage is not None:
                before_stage(run, stage)

        return note

    def watch(self, mailboxes: Sequence[Mailbox]) -> None:
        """These are read after a failure, until `forget`."""
        self._mailboxes = mailboxes
        device = mailboxes[0].memory.local.device
        self._reader = _DeviceReader(device, mailboxes[0].memory.nbytes) if device.type == "cuda" else None

    def forget(self) -> None:
        """The mailboxes' memory is about to be given back."""
        self._mailboxes, self._reader = (), None

    def position(self) -> Position:
        """Where this process stands; safe in any thread."""
        activity, step, layer, since = self._position
        return Position(activity=activity, step=step, layer=layer, seconds=time.monotonic() - since)

    def collect(
        self, rank: int, control: ControlPlane | None, reason: str, traceback: str | None, write: Write
    ) -> None:
        """Write this process's evidence, in two goes. The first call of a process does it; a later one waits for it."""
        with self._lock:
            if not self._collected:
                self._collected = True
                self._collect(rank, control, reason, traceback, write)

    def _collect(
        self, rank: int, control: ControlPlane | None, reason: str, traceback: str | None, write: Write
    ) -> None:
        evidence = RankEvidence(
            rank=rank,
            process_id=os.getpid(),
            hostname=socket.gethostname(),
            collected=time.time(),
            reason=reason,
            position=self.position(),
            versions=_loaded_versions(),
            waits=() if control is None else tuple(map(ExpiredWait.model_validate, control.waits())),
            processes={} if control is None else _processes(control),
            traceback=traceback,
            peers=self._peers(rank),
        )
        write(evidence)
        write(evidence.model_copy(update=self._read_mailboxes()))

    def _peers(self, rank: int) -> dict[int, ControlWords]:
        """Control words of the ranks of other processes whose memory this one has mapped: on the CPU only."""
        if len(self._mailboxes) != 1 or self._reader is not None:
            return {}
        layout, regions = self._mailboxes[0].layout, self._mailboxes[0].memory.regions
        return {peer: read_control(layout, region) for peer, region in enumerate(regions) if peer != rank}

    def _read_mailboxes(self) -> dict[str, object]:
        """The fields of the evidence that say what is in the mailboxes, or why that is not known."""
        read: list[MailboxEvidence] = []
        problems: list[str] = []

        def work() -> None:
            try:
                for mailbox in self._mailboxes:
                    local = mailbox.memory.local
                    region = local if self._reader is None else self._reader.copy(local)
                    read.append(read_mailbox(mailbox.layout, region, mailbox.rank))
            except Exception as error:  # whatever a broken device raises
                problems.append(f"mailboxes can't be read: {' '.join(str(error).split())}")

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(READ_SECONDS)
        if worker.is_alive():
            problems.append(f"mailboxes were not read within {READ_SECONDS:g} s")
        return {"mailboxes": tuple(read), "problem": problems[0] if problems else None}


class _DeviceReader:
    """Copies a region of a GPU to the host while kernels spin on other streams."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def copy(self, region: torch.Tensor) -> torch.Tensor:
        """The bytes of a region; valid until the next copy. Never returns if the device doesn't answer."""
        with torch.cuda.stream(self._stream):
            self._host.copy_(region, non_blocking=True)
            self._done.record(self._stream)
        while not self._done.query():
            time.sleep(POLL_SECONDS)
        return self._host


def _processes(control: ControlPlane) -> dict[int, PeerProcess]:
    """The processes of the other ranks, with the state of those that this one can see."""
    own = control.peers[control.rank].domain if control.peers else ""
    return {
        rank: PeerProcess(
            hostname=peer.hostname, process_id=peer.process_id, state=_state(peer) if peer.domain == own else None
        )
        for rank, peer in enumerate(control.peers)
        if rank != control.rank
    }


def _state(peer: Peer) -> str:
    try:
        status = Path(f"/proc/{peer.process_id}/status").read_text()
    except OSError:
        return "gone"
    state = next(line for line in status.splitlines() if line.startswith("State:"))
    return "gone" if peer.ended() else state.removeprefix("State:").strip()


def _loaded_versions() -> dict[str, str]:
    """Of Python and the packages that this process has imported; nothing is looked up."""
    loaded = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    versions = {name: str(getattr(module, "__version__", "unknown")) for name, module in loaded.items()}
    return {"python": sys.version.split()[0]} | versions


black_box = BlackBox()
