"""Bounded waits as the host sees them: the record of the first one that expired, and the error that carries it.

A wait that expires sets its rank's abort word and fills the record, on CPU and GPU alike; `read_record` turns the
record into a `Wait` and `MailboxTimeout` into a table of who waited for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dcp_decode.errors import WaitFailed
from dcp_decode.mailbox import RECORD_FIELDS, Mailbox, Stage


@dataclass(frozen=True)
class Wait:
    """An expired wait: `waiting_rank` at `stage` needed a word that `source_rank` writes.

    row, head, word: where in the mailbox the first missing word lies (head counts gathered heads in stage QUERY's
    mailbox, the waiting rank's own heads in the value mailbox; -1 where the mailbox has no heads; a credit word of the
    fused chain has neither row nor head). use: the stage's use counter. value_seen: the word's last value (int32).
    cta: block index on a GPU, 0 on a CPU. nanoseconds: clock when the wait expired (GPU global timer, or monotonic
    time).
    """

    stage: str
    waiting_rank: int
    source_rank: int
    row: int
    head: int
    word: int
    use: int
    value_seen: int
    cta: int
    nanoseconds: int

    def __str__(self) -> str:
        return (
            f"rank {self.waiting_rank} waited for rank {self.source_rank} in {self.stage}: "
            f"row {self.row}, head {self.head}, word {self.word}, use {self.use}, "
            f"saw {self.value_seen & 0xFFFFFFFF:#010x}"
        )

    def as_dict(self) -> dict[str, object]:
        """The record for a results document."""
        return asdict(self)


@dataclass(frozen=True)
class WaitTotal:
    """Waits of a rank at a stage so far that found words missing and ended well, and the seconds that they took."""

    rank: int
    stage: str
    count: int
    seconds: float


class MailboxTimeout(WaitFailed):
    """One or more mailbox waits expired; `waits` says who waited for whom. The group must be rebuilt."""

    def __init__(self, waits: Sequence[Wait], deadline_seconds: float) -> None:
        lines = "; ".join(map(str, waits))
        super().__init__(f"mailbox wait expired after {deadline_seconds:g} s: {lines}", [w.as_dict() for w in waits])
        self.waits = list(waits)


def write_record(mailbox: Mailbox, wait: Wait) -> None:
    """Set the abort word and keep the first record (CPU writer; one thread a rank)."""
    if int(mailbox.abort_word):
        return
    words = mailbox.record_words
    for index, field in enumerate(RECORD_FIELDS):
        words[index] = Stage[wait.stage].value if field == "stage" else getattr(wait, field)
    mailbox.abort_word.fill_(1)


def read_record(mailbox: Mailbox) -> Wait | None:
    """The first expired wait of this rank's mailbox (copied to the host if need be), or None."""
    if not int(mailbox.abort_word):
        return None
    values: dict[str, int] = dict(zip(RECORD_FIELDS, mailbox.record_words.tolist(), strict=False))
    stage = Stage(values.pop("stage")).name
    return Wait(stage=stage, **values)
