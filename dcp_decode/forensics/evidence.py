"""What one rank's process says after a failure: the form of `forensics-<rank>.json`. Needs no torch.

Words of a mailbox are counted by row: a row of a source is *armed* (none of its words is there), *arrived* (all are) or
*torn* (some are). Rows that the batch never used stay armed, and so do rows that were consumed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dcp_decode.records import write_json


class Evidence(BaseModel):
    """A part of the evidence: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Position(Evidence):
    """What the process was doing, and for how long. step, layer: -1 outside of steps and layers."""

    activity: str
    step: int
    layer: int
    seconds: float

    def __str__(self) -> str:
        places = [f"{name} {value}" for name, value in (("step", self.step), ("layer", self.layer)) if value >= 0]
        return f"{', '.join([*places, self.activity])} (for {self.seconds:.2f} s)"


class TornRow(Evidence):
    """A row of which `arrived` of `words` words are there; head and word name the first that is missing.

    head counts the source's heads in the query mailbox from its first, the waiting rank's own in the value mailbox;
    -1 where rows have no heads.
    """

    row: int
    arrived: int
    words: int
    head: int
    word: int


class Slot(Evidence):
    """Rows of one source in one generation of a mailbox, counted by their state."""

    mailbox: str
    generation: int
    source: int
    armed: int
    arrived: int
    torn: tuple[TornRow, ...] = ()


class ExpiredWait(Evidence):
    """Who waited for whom, as in `expired_waits` of the results: a place in a mailbox (`waits.Wait`), or a label."""

    stage: str
    waiting_rank: int
    source_rank: int
    label: str | None = None
    use: int = -1
    row: int = -1
    head: int = -1
    word: int = -1
    value_seen: int = 0
    cta: int = 0
    nanoseconds: int = 0

    def __str__(self) -> str:
        """What for, without the ranks."""
        if self.label is not None:
            return f"control plane, '{self.label}'"
        head = f"head {self.head}, " if self.head >= 0 else ""
        return f"{self.stage}, use {self.use}, row {self.row}, {head}word {self.word}"


class ControlWords(Evidence):
    """A rank's use counters by stage, its abort word, and its report buffer: the first wait that expired, if any."""

    uses: dict[str, int]
    aborted: bool
    report: ExpiredWait | None = None


class MailboxEvidence(Evidence):
    """One (virtual) rank's own mailboxes."""

    rank: int
    control: ControlWords
    slots: tuple[Slot, ...]


class PeerProcess(Evidence):
    """Another rank's process. state: the kernel's word, "T (stopped)" for example, "gone", or None: on another host."""

    hostname: str
    process_id: int
    state: str | None


class RankEvidence(Evidence):
    """Everything of one process. collected: seconds since the epoch.

    waits: control-plane waits under way. processes: the other ranks'. peers: control words of other ranks, where
    their memory is mapped here. problem: why mailboxes are missing.
    """

    rank: int
    process_id: int
    hostname: str
    collected: float
    reason: str
    position: Position
    versions: dict[str, str]
    waits: tuple[ExpiredWait, ...] = ()
    processes: dict[int, PeerProcess] = {}
    traceback: str | None = None
    peers: dict[int, ControlWords] = {}
    mailboxes: tuple[MailboxEvidence, ...] = ()
    problem: str | None = None


def write_evidence(folder: Path, evidence: RankEvidence) -> None:
    """As `forensics-<rank>.json` in the folder of a run's records."""
    with contextlib.suppress(FileNotFoundError):  # of a bare launcher, and the conclusion is drawn
        write_json(folder / f"forensics-{evidence.rank}.json", evidence.model_dump(mode="json"))


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a rank's Python stacks lie: written at the moment of SIGTERM or of a fatal signal, by faulthandler."""
    return folder / f"stacks-{rank}.txt"
