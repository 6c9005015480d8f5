"""Every step that a run of the protocol can take, as a static table.

A run is finite: each step is taken at most once. The table says for each step which steps must come before it
(program order of a thread, barriers, kernel order) and with which steps it does not commute (they touch a common word).
What a step does to the memory is :mod:`dcp_decode.protocol.model`; this module knows nothing of values.

Threads are as small as they can be, because that is the weakest order: each pushed word, each polled word and each
re-armed word has its own thread, and only the barriers and kernel boundaries named here order them::

    stage 1, one CTA a destination    begin -> push query word ...
    stage 2, one cluster a row        count -> begin (each reader CTA) -> poll (each word, each reader)
                                      all polls of a word -> re-arm it;  all polls of the row -> push payload, push LSE
    stage 3, one group a source slot  begin -> poll LSE -> poll payload word ...; each poll -> re-arm that word
    credit, with stage 2              begin -> push credit to a rank;  begin -> poll credit from a rank -> re-arm it

In a fused use the three stages are CTAs and warps of one kernel: all may begin as soon as the kernel before has ended.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from dcp_decode.protocol.rules import Counter, MergeWait, QueryCheck, Rearm, Rules, SecondRead, Size

STAGE_NAMES = {1: "query push", 2: "sparse decode", 3: "merge"}


class Kind(Enum):
    BEGIN = auto()  # a CTA passes its dependency wait and reads the use number
    COUNT_USE = auto()  # one thread increments a stage's use number
    COUNT_KEYS = auto()  # the row's key count turns out zero or not: a free choice
    PUSH_QUERY = auto()
    POLL_QUERY = auto()
    READ_QUERY = auto()  # loads a query word without polling it, or a second time
    ARM_QUERY = auto()
    PUSH_VALUE = auto()
    POLL_VALUE = auto()
    ARM_VALUE = auto()
    PUSH_CREDIT = auto()
    POLL_CREDIT = auto()
    ARM_CREDIT = auto()


@dataclass(frozen=True)
class Word:
    """One mailbox word, in every generation: ``value`` or query mailbox of ``home``, written by ``source``."""

    value: bool
    home: int
    source: int
    index: int


@dataclass(frozen=True)
class Step:
    """One step of one thread. ``peer`` is the other rank: a push's destination, a read word's source."""

    kind: Kind
    rank: int
    stage: int
    use: int
    peer: int = 0
    index: int = 0
    """Word of the row; in value mailboxes the last index is the LSE word, in query mailboxes the credit word."""
    cta: int = 0
    """Reader CTA in stage 2, destination in stage 1, source slot in stage 3."""

    @property
    def word(self) -> Word:
        """The mailbox word the step touches."""
        if self.kind in (Kind.PUSH_QUERY, Kind.PUSH_CREDIT):
            return Word(False, self.peer, self.rank, self.index)
        if self.kind is Kind.PUSH_VALUE:
            return Word(True, self.peer, self.rank, self.index)
        return Word(self.kind in (Kind.POLL_VALUE, Kind.ARM_VALUE), self.rank, self.peer, self.index)


PUSHES = frozenset({Kind.PUSH_QUERY, Kind.PUSH_VALUE, Kind.PUSH_CREDIT})
ARMS = frozenset({Kind.ARM_QUERY, Kind.ARM_VALUE, Kind.ARM_CREDIT})
STORES = PUSHES | ARMS
POLLS = frozenset({Kind.POLL_QUERY, Kind.POLL_VALUE, Kind.POLL_CREDIT})
READS = POLLS | {Kind.READ_QUERY}
LOCAL = frozenset({Kind.BEGIN, Kind.COUNT_USE, Kind.COUNT_KEYS})
"""Steps that touch no mailbox."""


def bits(mask: int) -> Iterator[int]:
    """The positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class StepTable:
    """All steps of ``rules`` at ``size``, in an order in which every step follows those that it waits for."""

    def __init__(self, rules: Rules, size: Size) -> None:
        self.rules = rules
        self.size = size
        self.steps: list[Step] = []
        self.before: list[int] = []
        """Mask of the steps that must be taken before; not transitive."""
        self.before_unless_empty: list[int] = []
        """The same, but waived where the row is empty."""
        self.kernels: list[int] = []
        """For each step, the number of its kernel on its rank."""
        self._kernel = 0
        self._kernels: dict[tuple[int, int], int] = {}
        self._starts: dict[tuple[int, int], int] = {}
        kernel = -1
        for use in range(size.uses):
            fused = rules.fused(use)
            for turn, stage in enumerate((2, 1, 3) if fused and rules.waits_before_pushes else (1, 2, 3)):
                if turn == 0 or not fused:
                    kernel += 1
                for rank in range(size.ranks):
                    self._add_stage(rank, stage, use, kernel)
            if fused:
                for rank in range(size.ranks):
                    self._add_fused_counting(rank, use, kernel)
        self.count = len(self.steps)
        self.all_before: list[int] = []
        """For each step, all steps without which it can never be taken."""
        for direct in self.before:
            self.all_before.append(self._with_all_before(direct))
        self.push_of = {(step.word, step.use): n for n, step in enumerate(self.steps) if step.kind in PUSHES}
        """The push of each word in each use."""
        self.polls = sum(1 << n for n, step in enumerate(self.steps) if step.kind in POLLS)
        self.row_before = [self._with_all_before(mask) for mask in self.before_unless_empty]
        """``before_unless_empty``, transitive."""
        polls = {step: n for n, step in enumerate(self.steps) if step.kind is Kind.POLL_VALUE}
        self.lse_poll = {n: 1 << polls[dataclasses.replace(step, index=size.words)] for step, n in polls.items()}
        """For each poll of stage 3, the mask of its slot's LSE poll."""
        self.siblings = self._siblings()
        """For each step, all steps of its row or slot in this use."""
        self.counts = {
            (step.rank, step.peer, step.use): n for n, step in enumerate(self.steps) if step.kind is Kind.COUNT_KEYS
        }
        """The step that counts the keys of each row in each use."""
        self.feeds = self._feeds()
        """For each load and re-arm, the pushes whose value it might find."""
        self.conflicts = self._conflicts()

    def _add(self, step: Step, before: int, unless_empty: int = 0) -> int:
        """Append a step and return its mask."""
        number = len(self.steps)
        self.steps.append(step)
        self.before.append(before)
        self.before_unless_empty.append(unless_empty)
        self.kernels.append(self._kernel)
        kernel = step.rank, self._kernel
        self._kernels[kernel] = self._kernels.get(kernel, 0) | 1 << number
        if step.kind is Kind.BEGIN:
            self._starts[kernel] = self._starts.get(kernel, 0) | 1 << number
        return 1 << number

    def _add_stage(self, rank: int, stage: int, use: int, kernel: int) -> None:
        self._kernel = kernel
        # A stage that does not wait may run as soon as every CTA of the grid before it has begun. Let that grid pass
        # its own wait first: the most favourable case, so that a counterexample does not rest on a careless trigger.
        order = self._starts if self.rules.missing_wait == stage else self._kernels
        ready = order.get((rank, kernel - 1), 0)
        if stage == 1:
            if self.rules.fused(use) and self.rules.waits_before_pushes:
                ready |= self._polls_of(self._kernels[rank, kernel])
            first = self._add_query_push(rank, use, ready)
        elif stage == 2:
            first = self._add_sparse_decode(rank, use, ready)
        else:
            first = self._add_merge(rank, use, ready)
        if not self.rules.fused(use):
            self._add_counting(rank, stage, use, first)

    def _polls_of(self, mask: int) -> int:
        return sum(1 << number for number in bits(mask) if self.steps[number].kind in POLLS)

    def counted_stage(self, step: Step) -> int:
        """The stage whose use number the CTA of a step reads."""
        return 1 if self.rules.fused(step.use) else step.stage

    def _add_fused_counting(self, rank: int, use: int, kernel: int) -> None:
        """The steps that increment all stages' use numbers inside a fused kernel."""
        begins = self._starts[rank, kernel]
        waits = {Counter.FIRST_CTA_STARTS: begins & -begins, Counter.LAST_CTA_READS: begins}
        for stage in (1, 2, 3):
            self._add(Step(Kind.COUNT_USE, rank, 1, use, cta=stage), waits[self.rules.fused_counter])

    def _add_counting(self, rank: int, stage: int, use: int, first_cta: int) -> None:
        """The step that increments a use number inside this kernel; ``cta`` holds the stage whose number it is."""
        kernel = rank, self._kernel
        begins = self._starts[kernel]
        first_begin = begins & -begins
        counter = self.rules.counter
        if counter is Counter.NEXT_STAGE:
            if kernel[1] > 0:
                self._add(Step(Kind.COUNT_USE, rank, stage, use, cta=stage - 1 or 3), first_begin)
        elif counter is Counter.FIRST_CTA_STARTS:
            self._add(Step(Kind.COUNT_USE, rank, stage, use, cta=stage), first_begin)
        elif counter is Counter.FIRST_CTA_ENDS:
            self._add(Step(Kind.COUNT_USE, rank, stage, use, cta=stage), first_cta)
        elif counter is Counter.LAST_CTA_ENDS:
            self._add(Step(Kind.COUNT_USE, rank, stage, use, cta=stage), self._kernels[kernel])

    def _add_query_push(self, rank: int, use: int, ready: int) -> int:
        first = 0
        for peer in range(self.size.ranks):
            begin = done = self._add(Step(Kind.BEGIN, rank, 1, use, peer, cta=peer), ready)
            for index in range(self.size.words):
                done |= self._add(Step(Kind.PUSH_QUERY, rank, 1, use, peer, index, cta=peer), begin)
            first = first or done
        return first

    def _add_sparse_decode(self, rank: int, use: int, ready: int) -> int:
        rules, words, readers = self.rules, self.size.words, self.size.readers
        first = 0
        for peer in range(self.size.ranks):
            counted = self._add(Step(Kind.COUNT_KEYS, rank, 2, use, peer), ready)
            begins = [
                self._add(Step(Kind.BEGIN, rank, 2, use, peer, cta=cta), ready | counted) for cta in range(readers)
            ]
            polls: dict[tuple[int, int], int] = {}
            for cta in range(readers):
                for index in range(words):
                    unchecked = rules.query_check is QueryCheck.FIRST_WORD and index > 0
                    kind = Kind.READ_QUERY if unchecked else Kind.POLL_QUERY
                    after = polls[0, cta] if unchecked else begins[cta]
                    polls[index, cta] = self._add(Step(kind, rank, 2, use, peer, index, cta), after)
            if rules.has_credit(use):
                self._add(Step(Kind.PUSH_CREDIT, rank, 2, use, peer, words), begins[0])
                poll = self._add(Step(Kind.POLL_CREDIT, rank, 2, use, peer, words), begins[0])
                self._add(Step(Kind.ARM_CREDIT, rank, 2, use, peer, words), poll)
            # Sums below are unions: the masks have no bit in common.
            row_read = sum(polls.values())
            arms = 0
            for index in range(words):
                word_read = sum(polls[index, cta] for cta in range(readers))
                if rules.second_read is not SecondRead.NEVER:
                    second = sum(
                        self._add(Step(Kind.READ_QUERY, rank, 2, use, peer, index, cta), polls[index, cta])
                        for cta in range(readers)
                    )
                    if rules.second_read is SecondRead.ASYNC_PROXY:
                        word_read |= second
                for cta in self._rearming(readers):
                    own = rules.rearm in (Rearm.ONE_AFTER_OWN, Rearm.EVERY_AFTER_OWN)
                    after = polls[index, cta] if own else word_read
                    arms |= self._add(Step(Kind.ARM_QUERY, rank, 2, use, peer, index, cta), after)
            after = row_read | (arms if rules.value_push_after_rearm else 0)
            done = row_read | arms
            for index in range(words + 1):
                step = Step(Kind.PUSH_VALUE, rank, 2, use, peer, index)
                if rules.empty_push_after_polls:
                    done |= self._add(step, after)
                else:
                    done |= self._add(step, begins[0], after)
            first = first or done
        return first

    def _rearming(self, readers: int) -> range:
        if self.rules.rearm is Rearm.NEVER:
            return range(0)
        return range(readers if self.rules.rearm in (Rearm.EVERY_AFTER_ALL, Rearm.EVERY_AFTER_OWN) else 1)

    def _add_merge(self, rank: int, use: int, ready: int) -> int:
        words, lse = self.size.words, self.size.words
        payload_first = self.rules.merge_wait is MergeWait.PAYLOAD_THEN_LSE
        first = 0
        for peer in range(self.size.ranks):
            begin = self._add(Step(Kind.BEGIN, rank, 3, use, peer, cta=peer), ready)
            order = [*range(words), lse] if payload_first else [lse, *range(words)]
            polls: dict[int, int] = {}
            for index in order:
                after = begin
                if index == lse and payload_first:
                    after |= sum(polls.values())
                elif index != lse and not payload_first:
                    after |= polls[lse]
                polls[index] = self._add(Step(Kind.POLL_VALUE, rank, 3, use, peer, index, cta=peer), after)
            done = begin
            for index, poll in polls.items():
                done |= poll | self._add(Step(Kind.ARM_VALUE, rank, 3, use, peer, index, cta=peer), poll)
            first = first or done
        return first

    def _siblings(self) -> list[int]:
        groups: dict[tuple[int, int, int, int], int] = {}
        keys = [(step.rank, step.peer, step.stage, step.use) for step in self.steps]
        for number, step in enumerate(self.steps):
            if step.kind is not Kind.COUNT_USE:
                groups[keys[number]] = groups.get(keys[number], 0) | 1 << number
        return [groups[key] for key in keys]

    def _place(self, step: Step) -> tuple[Word, int]:
        """The word and generation that a step touches; where use numbers may be wrong, every generation as one."""
        return step.word, self.rules.generation(step.use) if self.rules.numbers_are_right else 0

    def _feeds(self) -> list[int]:
        pushes: dict[tuple[Word, int], int] = {}
        for number, step in enumerate(self.steps):
            if step.kind in PUSHES:
                pushes[self._place(step)] = pushes.get(self._place(step), 0) | 1 << number
        return [pushes[self._place(step)] if step.kind in READS or step.kind in ARMS else 0 for step in self.steps]

    def _with_all_before(self, mask: int) -> int:
        for number in bits(mask):
            mask |= self.all_before[number]
        return mask

    def _conflicts(self) -> list[int]:
        """For each step, the steps it does not commute with: a common word, and not two loads of it."""
        readers: dict[object, int] = {}
        writers: dict[object, int] = {}
        touched: list[list[tuple[object, bool]]] = []
        for number, step in enumerate(self.steps):
            places: list[tuple[object, bool]] = []
            if step.kind in READS or step.kind in STORES:
                places.append((self._place(step), step.kind in STORES))
            if step.kind is Kind.BEGIN:
                places.append((("use", step.rank, self.counted_stage(step)), False))
            if step.kind is Kind.COUNT_USE:
                places.append((("use", step.rank, step.cta), True))
            touched.append(places)
            for place, writes in places:
                book = writers if writes else readers
                book[place] = book.get(place, 0) | 1 << number
        conflicts = []
        for number, places in enumerate(touched):
            mask = 0
            for place, writes in places:
                mask |= writers.get(place, 0)
                if writes:
                    mask |= readers.get(place, 0)
            conflicts.append(mask & ~(1 << number))
        return conflicts
