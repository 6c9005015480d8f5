"""Several ranks of the real CPU stages in one process, every interleaving of which a schedule decides.

Each rank runs its program (the stages of a few uses) in its own thread, but only one thread runs at a time and only
when the schedule resumes it. A rank pauses before every stage and in every poll of a wait: the arrival code's own
`time.sleep` is the pause, so partly arrived mailboxes are polled by the code under test itself.

The memory between them is weaker than any machine's, word by word:

    rank's store to a peer -> in flight, per (writer, peer) -> the peer's region     any subset, in any order;
                                                                                     one word's stores keep their order
    rank's re-arm of its own words -> its store buffer -> its own region             any subset, at the latest when the
                                                                                     rank next starts a query push

A rank sees its own buffered re-arms at once (store forwarding) and its pushes to itself too. The fence at the query
push is the contract's; a CPU's stores are ordered more strictly than that.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from unittest import mock

import torch

from dcp_decode import numerics, topk
from dcp_decode.cpu import arrival
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.fabric.memory import SymmetricMemory, address_table
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import CONTROL_BYTES, INITIAL_USES, Mailbox, MailboxLayout, Stage

CAPACITY = 2
TOPK = 4
KEYS_A_ROW = 2  # two keys, so that a row's partial depends on its query and not only on its keys
UNWRITTEN = 0x5A17C0DE  # what a peer's shadow holds where the rank has stored nothing
HASH_STEP = 0x9E3779B1
ALL_PARTS = 4  # a part number selects a quarter of the words by a hash, this one selects all

SECTIONS = ("topk", "query", "payload", "lse_log2")


def small_geometry(ranks: int) -> Geometry:
    return Geometry(heads=16, dcp=ranks, capacity=CAPACITY, padded_heads=16, topk=TOPK)


@dataclass(frozen=True)
class Use:
    """One use of the mailboxes: holds[rank][row] says whether the rank stores keys of the row (all rows alike)."""

    number: int
    holds: tuple[tuple[bool, ...], ...]

    @property
    def batch(self) -> int:
        return len(self.holds[0])


@dataclass(frozen=True)
class Outcome:
    """What one rank got out of one use: its selected positions int64 [B, K] and merged rows BF16 [B, H, 512]."""

    positions: torch.Tensor
    merged: torch.Tensor


@dataclass(frozen=True)
class Payload:
    """What one rank puts into a use, coded by rank, use and row (and by nothing else)."""

    candidates: torch.Tensor  # int64 [B, K]
    query: torch.Tensor  # BF16 [B, H, 576]
    cache: torch.Tensor  # uint8 [B * KEYS_A_ROW, 576]
    rows: torch.Tensor  # int32 [B, K]
    valid: torch.Tensor  # int32 [B]


@lru_cache(maxsize=4096)
def make_payload(geometry: Geometry, use: Use, rank: int) -> Payload:
    rows = []
    for row in range(use.batch):
        generator = torch.Generator().manual_seed(use.number * 64 + rank * 8 + row)
        # Distinct positions on every rank; the order of the scores differs from use to use.
        positions = torch.arange(TOPK) * geometry.dcp + rank + 1000 * use.number
        candidates = topk.candidate_keys(torch.rand(TOPK, generator=generator), positions)
        query = torch.randn(geometry.owner_heads, numerics.ROW_BYTES, generator=generator)
        keys = torch.randn(KEYS_A_ROW, numerics.ROW_BYTES, generator=generator)
        rows.append((candidates, query, keys))
    candidates, queries, keys = (torch.stack(parts) for parts in zip(*rows, strict=True))
    indices = torch.full((use.batch, TOPK), -1, dtype=torch.int32)
    indices[:, :KEYS_A_ROW] = torch.arange(use.batch * KEYS_A_ROW, dtype=torch.int32).view(use.batch, KEYS_A_ROW)
    valid = torch.tensor(use.holds[rank], dtype=torch.int32) * KEYS_A_ROW
    indices[valid == 0] = -1
    cache = numerics.quantize_e4m3(keys.view(-1, numerics.ROW_BYTES), geometry.k_scale)
    return Payload(candidates, queries.to(torch.bfloat16), cache, indices, valid)


# A rank's stages as (name, run), in order; `merge` and `select` leave their results in `Rank`.
Step = tuple[str, Callable[[], None]]


@dataclass
class Rank:
    """One rank's stages and its program over the uses of a run."""

    stages: CpuStages
    route: str
    uses: tuple[Use, ...]
    outcomes: list[Outcome] = field(default_factory=list)

    def steps(self) -> list[Step]:
        return [step for use in self.uses for step in self._steps_of(use)]

    def _steps_of(self, use: Use) -> list[Step]:
        stages = self.stages
        payload = make_payload(stages.geometry, use, stages.rank)
        left: dict[str, object] = {}

        def select() -> None:
            left["positions"] = stages.select(use.batch)

        def sparse_local() -> None:
            left["partial"] = stages.sparse_decode_local(payload.cache, payload.rows, payload.valid)

        def merge() -> None:
            after = Stage.SPARSE if self.route == "push" else Stage.PUSH
            self.outcomes.append(Outcome(left["positions"], stages.merge(use.batch, after)))  # type: ignore[arg-type]

        decode: list[Step] = [
            ("sparse_decode", lambda: stages.sparse_decode_push(payload.cache, payload.rows, payload.valid))
        ]
        if self.route == "local":
            decode = [("sparse_decode", sparse_local), ("value_push", lambda: stages.value_push(left["partial"]))]  # type: ignore[arg-type]
        return [
            ("select_push", lambda: stages.select_push(payload.candidates)),
            ("select", select),
            ("query_push", lambda: stages.query_push(payload.query)),
            *decode,
            ("merge", merge),
        ]


@lru_cache(maxsize=4096)
def undisturbed(geometry: Geometry, route: str, use: Use) -> tuple[Outcome, ...]:
    """Every rank's outcome of one use on fresh mailboxes, stage by stage, with no delays anywhere."""
    layout = MailboxLayout(geometry)
    ranks = []
    for memory in LoopbackFabric(geometry.dcp).allocate(layout.nbytes):
        mailbox = Mailbox(layout, memory)
        mailbox.arm()
        ranks.append(Rank(CpuStages(mailbox, deadline_seconds=1.0), route, (use,)))
    for together in zip(*(rank.steps() for rank in ranks), strict=True):
        for _, run in together:
            run()
    return tuple(rank.outcomes[0] for rank in ranks)


class Violation(AssertionError):
    """A property of the protocol does not hold; the message names it first."""


class _Stopped(BaseException):
    """Ends a rank's thread from outside. No Exception: nothing in the code under test may catch it."""


class RankThread:
    """A rank's program in a thread that runs only between `resume` and its next pause."""

    def __init__(self, rank: Rank, before_stage: Callable[[str], None], after_stage: Callable[[], None]) -> None:
        self.rank = rank
        self.before_stage = before_stage
        self.after_stage = after_stage
        self.completed = 0
        self.finished = False
        self.error: BaseException | None = None
        self._stop = False
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Let the rank run to its next pause; raises what the code under test raised."""
        self._go.release()
        self._paused.acquire()
        if self.error is not None:
            raise self.error

    def pause(self) -> None:
        """Called in the rank's own thread: give the turn back to the schedule."""
        self._paused.release()
        self._go.acquire()
        if self._stop:
            raise _Stopped

    def stop(self) -> None:
        if not self.finished:
            self._stop = True
            self._go.release()
            self._paused.acquire()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._stop:
                for name, run in self.rank.steps():
                    self.before_stage(name)
                    run()
                    self.after_stage()
                    self.completed += 1
                    self.pause()
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.finished = True
            self._paused.release()


StagesFactory = Callable[[Mailbox, "ScheduledGroup"], CpuStages]


def correct_stages(mailbox: Mailbox, _group: ScheduledGroup) -> CpuStages:
    return CpuStages(mailbox, deadline_seconds=1.0)


class ScheduledGroup:
    """The ranks and the memory between them. `factory` makes a rank's stages; `kept` are sections never re-armed."""

    def __init__(
        self,
        ranks: int,
        route: str,
        uses: tuple[Use, ...],
        factory: StagesFactory = correct_stages,
        kept: tuple[str, ...] = (),
    ) -> None:
        torch.set_num_threads(1)
        self.geometry = small_geometry(ranks)
        self.layout = MailboxLayout(self.geometry)
        self.route = route
        self.uses = uses
        self.ranks = range(ranks)
        self.failed: BaseException | None = None
        size = -(-self.layout.nbytes // 4)
        self.words = [torch.empty(size, dtype=torch.int32) for _ in self.ranks]  # the ranks' real regions
        self.shadows = [[torch.full((size,), UNWRITTEN, dtype=torch.int32) for _ in self.ranks] for _ in self.ranks]
        # In flight from writer to peer: stores in program order, each (indices, values).
        self.flights: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {
            pair: [] for pair in itertools.permutations(self.ranks, 2)
        }
        self.buffered = [torch.zeros(size, dtype=torch.bool) for _ in self.ranks]  # re-arms not yet in the region
        self.kept = torch.zeros(size, dtype=torch.bool)
        for name in kept:
            section = getattr(self.layout, name)
            self.kept[section.offset // 4 : (section.offset + section.nbytes) // 4] = True
        self.hashes = (torch.arange(size) * HASH_STEP & 0xFFFFFFFF) >> 24
        self.threads: list[RankThread] = []
        for rank in self.ranks:
            regions = tuple(
                (self.words[peer] if peer == rank else self.shadows[rank][peer]).view(torch.uint8)
                for peer in self.ranks
            )
            mailbox = Mailbox(self.layout, SymmetricMemory(rank, regions, address_table(regions)))
            mailbox.arm()
            program = Rank(factory(mailbox, self), route, uses)
            self.threads.append(
                RankThread(
                    program, lambda name, rank=rank: self._starting(rank, name), lambda rank=rank: self.collect(rank)
                )
            )
        self.running = 0
        clock = SimpleNamespace(sleep=self._poll, monotonic=lambda: 0.0, monotonic_ns=lambda: 0)
        self._patch = mock.patch.object(arrival, "time", clock)
        self._patch.start()

    def close(self) -> None:
        for thread in self.threads:
            thread.stop()
        self._patch.stop()

    @property
    def finished(self) -> bool:
        return all(thread.finished for thread in self.threads)

    def run(self, rank: int) -> None:
        """Resume a rank until it pauses: after a stage, or in a poll of a wait that has words missing."""
        thread = self.threads[rank]
        if thread.finished:
            return
        self.running = rank
        region, buffered = self.words[rank], self.buffered[rank]
        memory = region.clone()
        region[buffered] = numerics.ARMED_WORD  # the rank sees its own re-arms
        seen = region.clone()
        completed = thread.completed
        try:
            thread.resume()
        except BaseException as error:
            self.failed = error
            raise
        self.collect(rank)
        rearmed = (region == numerics.ARMED_WORD) & (seen != numerics.ARMED_WORD)
        rearmed[: CONTROL_BYTES // 4] = False
        # Everybody else sees the words as they were, until the buffered re-arms are committed.
        buffered &= region == numerics.ARMED_WORD  # a push of its own to a word follows its re-arm
        later = buffered | rearmed
        region[later] = memory[later]
        buffered |= rearmed & ~self.kept
        if thread.completed != completed:
            try:
                self._check_outcomes(rank)
            except Violation as violation:
                self.failed = violation
                raise

    def deliver(self, writer: int, peer: int, part: int = ALL_PARTS, only: str | None = None) -> None:
        """Let stores of a writer reach a peer: those that `part` selects, of one section or of all.

        At most one store a word, the oldest: a second one to the same word takes a second call.
        """
        remaining = []
        behind = torch.zeros_like(self.kept)  # words of which this writer has an older store
        for indices, values in self.flights[writer, peer]:
            chosen = self._chosen(indices, part, only) & ~behind[indices]
            self.words[peer][indices[chosen]] = values[chosen]
            behind[indices] = True
            if not chosen.all():
                remaining.append((indices[~chosen], values[~chosen]))
        self.flights[writer, peer] = remaining

    def commit(self, rank: int, part: int = ALL_PARTS) -> None:
        """Let buffered re-arms of a rank reach its region, over whatever has arrived there meanwhile."""
        indices = self.buffered[rank].nonzero().squeeze(1)
        chosen = indices[self._chosen(indices, part, None)]
        self.words[rank][chosen] = numerics.ARMED_WORD
        self.buffered[rank][chosen] = False

    def round(self, first: int, late: str | None = None) -> None:
        """What is in flight arrives (but for a section that is late), then every rank runs once, in order from `first`.

        Re-arms may stay buffered.
        """
        for writer, peer in self.flights:
            for name in SECTIONS:
                if name != late:
                    self.deliver(writer, peer, only=name)
        for step in self.ranks:
            self.run((first + step) % len(self.ranks))

    def drain(self, first: int, late: str | None) -> None:
        """Let everybody finish, ranks in order from `first`; what is late comes only when nobody can go on without it.

        A group that is stuck although everything has arrived is a violation.
        """
        idle = 0
        while not self.finished:
            before = self._completed()
            self.round(first, late)
            idle = 0 if self._completed() != before else idle + 1
            if idle:
                self._settle()
            if idle > 4:  # a merge waits twice in one stage: two settled polls are enough to end any stage
                stuck = {t.rank.stages.rank: t.completed for t in self.threads if not t.finished}
                raise Violation(f"deadlock: everything has arrived, and these ranks wait after their stages: {stuck}")
        self._settle()

    def check_end(self) -> None:
        """Everything has been read: the mailboxes are as new, and the counters stand for the uses that ran."""
        for rank in self.ranks:
            mailbox = self.threads[rank].rank.stages.mailbox
            left = (self.words[rank] != numerics.ARMED_WORD)[CONTROL_BYTES // 4 :]
            for name in SECTIONS:
                section = getattr(self.layout, name)
                start = (section.offset - CONTROL_BYTES) // 4
                count = int(left[start : start + section.nbytes // 4].sum())
                if count:
                    raise Violation(f"not armed at the end: {count} words of rank {rank}'s {name} mailbox")
            for stage, first in INITIAL_USES.items():
                # A stage counts its predecessor's use, so the last merge is not counted yet; PUSH is the local route's.
                expected = first + len(self.uses)
                if stage is Stage.PUSH and self.route == "push":
                    expected = 0
                if int(mailbox.use_counter(stage)) != expected:
                    raise Violation(f"use counter of {stage.name} on rank {rank}: {int(mailbox.use_counter(stage))}")

    def collect(self, rank: int) -> None:
        """Take the stores that a rank has made to its peers into flight."""
        for peer in self.ranks:
            if peer == rank:
                continue
            shadow = self.shadows[rank][peer]
            indices = (shadow != UNWRITTEN).nonzero().squeeze(1)
            if len(indices):
                self.flights[rank, peer].append((indices, shadow[indices]))
                shadow[indices] = UNWRITTEN

    def _starting(self, rank: int, name: str) -> None:
        # The query push begins with a fence, so re-arms from before it are in the region before anything it pushes.
        # They are in the rank's view of the region already: they only leave the buffer.
        if name == "query_push":
            self.buffered[rank].zero_()

    def _poll(self, _seconds: float) -> None:
        self.threads[self.running].pause()

    def _settle(self) -> None:
        for writer, peer in self.flights:
            while self.flights[writer, peer]:
                self.deliver(writer, peer)
        for rank in self.ranks:
            self.commit(rank)

    def _completed(self) -> int:
        return sum(thread.completed for thread in self.threads)

    def _chosen(self, indices: torch.Tensor, part: int, only: str | None) -> torch.Tensor:
        chosen = torch.ones(len(indices), dtype=torch.bool)
        if part != ALL_PARTS:
            chosen = self.hashes[indices] % ALL_PARTS == part
        if only is not None:
            section = getattr(self.layout, only)
            chosen &= (indices * 4 >= section.offset) & (indices * 4 < section.offset + section.nbytes)
        return chosen

    def _check_outcomes(self, rank: int) -> None:
        """Compare a use as soon as its merge has returned."""
        outcomes = self.threads[rank].rank.outcomes
        if not outcomes:
            return
        use = self.uses[len(outcomes) - 1]
        expected = undisturbed(self.geometry, self.route, use)[rank]
        if not torch.equal(outcomes[-1].positions, expected.positions):
            raise Violation(f"wrong selection on rank {rank}, use {use.number}")
        if not torch.equal(outcomes[-1].merged.view(torch.int16), expected.merged.view(torch.int16)):
            different = (outcomes[-1].merged != expected.merged).any(dim=2).nonzero()[0].tolist()
            raise Violation(f"wrong merged row on rank {rank}, use {use.number}: (row, head) {different}")
