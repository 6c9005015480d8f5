"""Fault injection into the stages of a rank: a hook for `step.verify_layer`, seeded, the same plan on every rank.

    delay     the rank sleeps 0 .. longest_delay_seconds before a stage, a quarter of the longest in the mean
    stop      the whole process is stopped (SIGSTOP) before a stage, and continued after stop_seconds
    kill      the process ends itself with SIGKILL
    raise     the rank raises an exception that nobody expects
    late      the rank sleeps for late_seconds
    corrupt   a word of the rank's slot in a victim's value, query or top-k mailbox is overwritten after it has arrived
    sentinel  a query head, a cache row or (local route) a partial row is replaced by one bit pattern

Delays and stops happen at a fraction of the stages, drawn by (seed, rank, number of the stage call); the others at one
named place each. What has happened is counted where it happens.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import torch

from dcp_decode import numerics
from dcp_decode.mailbox import CONTROL_BYTES, Mailbox, Section, Stage
from dcp_decode.process_status import process_status
from dcp_decode.step import STAGES, LayerRun

DONE_OFFSET = CONTROL_BYTES - 4  # a control word that the protocol leaves alone: the corruption has happened
POLL_SECONDS = 0.0005
LONGEST_POLL_SECONDS = 5.0

# BF16 bit patterns as signed 16-bit integers. All ones is a negative NaN, and two of them are an armed word.
SENTINELS = {"all_ones": -1, "negative_zero": -0x8000, "nan": 0x7FC1, "infinity": 0x7F80}

MailboxName = Literal["topk", "query", "payload", "lse_log2"]


@dataclass(frozen=True)
class Place:
    """One stage call: before `stage` (a name of `step.STAGES`) of a rank, in a layer of a verify step."""

    rank: int
    step: int
    layer: int
    stage: str


@dataclass(frozen=True)
class Corruption:
    """In a step and layer: writer overwrites the first word of row 0 of its own slot in a victim's mailbox.

    value: what it stores, signed 32-bit; None flips one bit of what is there (0: the lowest). Writer and victim may be
    one rank.
    """

    writer: int
    victim: int
    step: int
    layer: int
    mailbox: MailboxName
    value: int | None
    bit: int = 0


@dataclass(frozen=True)
class Sentinel:
    """A pattern of SENTINELS in row 0 of what a rank hands to a stage of a step's layer.

    target: "query" (own head 0), "partial" (latent of gathered head 0, local route only), or "keys" (every cache row
    that row 0 selects on that rank, as the E4M3 bytes of the pattern).
    """

    rank: int
    step: int
    layer: int
    target: Literal["query", "partial", "keys"]
    pattern: str


@dataclass(frozen=True)
class FaultPlan:
    """What to inject. delay_share, stop_share: fractions of all stage calls."""

    seed: int = 0
    delay_share: float = 0.0
    longest_delay_seconds: float = 0.2
    stop_share: float = 0.0
    stop_seconds: float = 0.3
    stop_at: Place | None = None
    kill_at: Place | None = None
    raise_at: Place | None = None
    late_at: Place | None = None
    late_seconds: float = 0.0
    corruption: Corruption | None = None
    sentinel: Sentinel | None = None


# Faults that a job must go red for, by name; in the second step, when all ranks are under way.
EXAMPLES = {
    # A word of rank 0's partial rows never arrives at rank 1.
    "hang": FaultPlan(corruption=Corruption(0, 1, 1, 0, "payload", numerics.ARMED_WORD)),
    # The highest bit of the exponent of one BF16 that rank 0 pushes to rank 1.
    "wrong-bit": FaultPlan(corruption=Corruption(0, 1, 1, 0, "payload", None, bit=14)),
}


@dataclass
class FaultCounts:
    """What one process has injected, with the seconds that it slept or was stopped."""

    stage_calls: int = 0
    delays: int = 0
    delay_seconds: float = 0.0
    stops: int = 0
    stop_seconds: float = 0.0
    corruptions: int = 0
    sentinels: int = 0


@dataclass
class FaultInjector:
    """The hook: call it before each stage. One a process; counts what it has done."""

    plan: FaultPlan
    layers: int
    route: str
    counts: FaultCounts = field(default_factory=FaultCounts)
    _calls: dict[int, int] = field(default_factory=dict)

    def __call__(self, run: LayerRun, stage: str) -> None:
        rank = run.state.rank
        call = self._calls.get(rank, 0)
        self._calls[rank] = call + 1
        self.counts.stage_calls += 1
        place = Place(rank, call // len(STAGES[self.route]) // self.layers, run.layer, stage)
        self._delay(rank, call)
        if place == self.plan.stop_at:
            self._stop()
        if place == self.plan.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if place == self.plan.raise_at:
            raise RuntimeError(f"injected before {stage}")
        if place == self.plan.late_at:
            time.sleep(self.plan.late_seconds)
        if self.plan.corruption is not None:
            self._corrupt(self.plan.corruption, place, run.state.stages.mailbox)
        if self.plan.sentinel is not None:
            self._replace(self.plan.sentinel, place, run)

    def _delay(self, rank: int, call: int) -> None:
        plan = self.plan
        if not plan.delay_share and not plan.stop_share:
            return
        random = Random(f"{plan.seed} {rank} {call}")
        draw = random.random()
        if draw < plan.delay_share:
            # Cubed: most delays are about as long as a stage, where they change who comes first; some are very long.
            seconds = plan.longest_delay_seconds * random.random() ** 3
            time.sleep(seconds)
            self.counts.delays += 1
            self.counts.delay_seconds += seconds
        elif draw < plan.delay_share + plan.stop_share:
            self._stop()

    def _stop(self) -> None:
        started = time.monotonic()
        stop_this_process(self.plan.stop_seconds)
        self.counts.stops += 1
        self.counts.stop_seconds += time.monotonic() - started

    def _corrupt(self, corruption: Corruption, place: Place, mailbox: Mailbox) -> None:
        push, decode = Stage.SPARSE, "sparse_decode_push"
        if self.route == "local":
            push, decode = Stage.PUSH, "sparse_decode_local"
        stored_by, read_by = {"topk": (Stage.TOPK, "select"), "query": (Stage.QUERY, decode)}.get(
            corruption.mailbox, (push, "merge")
        )
        if (place.step, place.layer, place.stage) != (corruption.step, corruption.layer, read_by):
            return
        # Before the reading stage both ranks have made their own stores: the writer's come before its corruption, and
        # the victim waits for that, so the word is what its reading stage finds.
        done = mailbox.memory.regions[corruption.victim][DONE_OFFSET : DONE_OFFSET + 4].view(torch.int32)[0]
        if place.rank == corruption.writer:
            word = _word(mailbox, corruption, int(mailbox.use_counter(stored_by)))
            word.fill_(int(word) ^ (1 << corruption.bit) if corruption.value is None else corruption.value)
            done.fill_(1)
            self.counts.corruptions += 1
        elif place.rank == corruption.victim:
            until = time.monotonic() + LONGEST_POLL_SECONDS
            while not int(done) and time.monotonic() < until:
                time.sleep(POLL_SECONDS)

    def _replace(self, sentinel: Sentinel, place: Place, run: LayerRun) -> None:
        stages = {
            "query": "query_push",
            "partial": "value_push",
            "keys": "sparse_decode_push" if self.route == "push" else "sparse_decode_local",
        }
        if place != Place(sentinel.rank, sentinel.step, sentinel.layer, stages[sentinel.target]):
            return
        bits = SENTINELS[sentinel.pattern]
        if sentinel.target == "query":
            run.query.view(torch.int16)[0, 0] = bits
        elif sentinel.target == "partial":
            run.partial.latent.view(torch.int16)[0, 0] = bits
        else:
            value = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)
            encoded = numerics.quantize_e4m3(value, run.state.cache.geometry.k_scale)
            selected = run.selection.rows[0, : int(run.selection.valid[0])].long()
            run.state.cache.rows[run.layer][selected] = encoded
        self.counts.sentinels += 1


def _word(mailbox: Mailbox, corruption: Corruption, use: int) -> torch.Tensor:
    """int32 scalar: the first word of row 0 of the writer's slot in the victim's mailbox."""
    geometry = mailbox.geometry
    section: Section = getattr(mailbox.layout, corruption.mailbox)
    words = section.words(mailbox.memory.regions[corruption.victim])[use % geometry.generations]
    if corruption.mailbox == "query":
        return words[0, corruption.writer * geometry.owner_heads, 0]
    slot = words[corruption.writer, 0]  # (K * 2,), (H, 256) or (H,)
    return slot.view(-1)[0]


def stop_this_process(seconds: float) -> None:
    """SIGSTOP this process; a child of its own continues it `seconds` after it has stopped."""
    stopped = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            until = time.monotonic() + LONGEST_POLL_SECONDS
            while (status := process_status(stopped)) and not status.stopped and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
            time.sleep(seconds)
            os.kill(stopped, signal.SIGCONT)
        finally:
            os._exit(0)
    os.kill(stopped, signal.SIGSTOP)
    os.waitpid(child, 0)
