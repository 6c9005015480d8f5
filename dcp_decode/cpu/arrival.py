"""Bounded wait for mailbox words on a CPU: the payload is the flag, and the checked word is the used word.

Preconditions: the words are aligned 32-bit elements that peers store at most once after they were armed; the caller
re-arms them after the snapshot and before it does anything that lets the writer reuse the generation. x86 keeps a
core's stores in order and aligned 32-bit accesses whole; an armed word is therefore the only state besides "arrived".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from dcp_decode import numerics
from dcp_decode.errors import RankDied
from dcp_decode.mailbox import Mailbox, Stage
from dcp_decode.waits import MailboxTimeout, Wait, WaitTotal, read_record, write_record

FIRST_PAUSE_SECONDS = 20e-6
LONGEST_PAUSE_SECONDS = 1e-3
PEER_CHECK_SECONDS = 0.05

# Maps the index of a missing word to (source rank, row, head, word).
Locate = Callable[[tuple[int, ...]], tuple[int, int, int, int]]


class Arrival:
    """Waits of one rank, counted in `totals`.

    dead_peers: asks the control plane for peers whose process has ended (rank -> how).
    """

    def __init__(
        self,
        mailbox: Mailbox,
        deadline_seconds: float,
        dead_peers: Callable[[], dict[int, str]] = dict,
    ) -> None:
        self.mailbox = mailbox
        self.deadline_seconds = deadline_seconds
        self.dead_peers = dead_peers
        self.totals: dict[Stage, WaitTotal] = {}

    def snapshot(
        self, words: torch.Tensor, stage: Stage, use: int, locate: Locate, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A private copy of `words` (int32, any shape) once every wanted one has arrived.

        wanted: bool, broadcastable to the shape; unwanted words come back as they were (armed or not) and are never
        to be used. Raises MailboxTimeout past the deadline, at once if an earlier wait of this rank has expired, and
        RankDied as soon as a peer's process is gone.
        """
        self._refuse_aborted()
        copy = words.clone()
        missing = copy == numerics.ARMED_WORD
        if wanted is not None:
            missing &= wanted
        if not missing.any():
            return copy
        start = time.monotonic()
        next_check = start + PEER_CHECK_SECONDS
        pause = FIRST_PAUSE_SECONDS
        while True:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            copy = torch.where(missing, words, copy)
            missing &= copy == numerics.ARMED_WORD
            if not missing.any():
                self._count(stage, time.monotonic() - start)
                return copy
            now = time.monotonic()
            if now >= next_check:
                self._refuse_dead_peers(missing, stage, use, locate)
                next_check = now + PEER_CHECK_SECONDS
            if now - start > self.deadline_seconds:
                wait = self._wait(missing, stage, use, locate)
                write_record(self.mailbox, wait)
                raise MailboxTimeout([wait], self.deadline_seconds)

    def _count(self, stage: Stage, seconds: float) -> None:
        before = self.totals.get(stage, WaitTotal(self.mailbox.rank, stage.name, 0, 0.0))
        self.totals[stage] = replace(before, count=before.count + 1, seconds=before.seconds + seconds)

    def _refuse_aborted(self) -> None:
        earlier = read_record(self.mailbox)
        if earlier is not None:
            raise MailboxTimeout([earlier], self.deadline_seconds)

    def _refuse_dead_peers(self, missing: torch.Tensor, stage: Stage, use: int, locate: Locate) -> None:
        dead = self.dead_peers()
        if dead:
            wait = self._wait(missing, stage, use, locate)
            write_record(self.mailbox, wait)
            names = ", ".join(f"rank {rank} {how}" for rank, how in sorted(dead.items()))
            raise RankDied(f"{names}; {wait}", [wait.as_dict()])

    def _wait(self, missing: torch.Tensor, stage: Stage, use: int, locate: Locate) -> Wait:
        index = tuple(missing.nonzero()[0].tolist())
        source, row, head, word = locate(index)
        return Wait(
            stage=stage.name,
            waiting_rank=self.mailbox.rank,
            source_rank=source,
            row=row,
            head=head,
            word=word,
            use=use,
            value_seen=numerics.ARMED_WORD,
            cta=0,
            nanoseconds=time.monotonic_ns(),
        )
