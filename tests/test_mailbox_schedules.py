"""The CPU stages under random schedules: a hypothesis state machine over `scheduled_ranks`, and the bugs it must find.

The bugs are injected into the real stages or into what their stores do; each must be found by the same search, within
a bounded number of schedules. The number that it took is printed (pytest -s).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from scheduled_ranks import ALL_PARTS, SECTIONS, ScheduledGroup, StagesFactory, Use, Violation, correct_stages

from dcp_decode import numerics
from dcp_decode.cpu.attention import Partial, sparse_attention
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.mailbox import Mailbox, Stage

USES = 4  # with two generations: every generation is used, re-armed, and used again
CORRECT_SCHEDULES = {2: 60, 4: 25}
BUGGY_SCHEDULES = 50

SECTION = st.sampled_from((None, *SECTIONS))


class Schedules(RuleBasedStateMachine):
    """Random schedules of correct stages; subclasses set what is injected."""

    ranks = 2
    route = "push"
    factory: StagesFactory = staticmethod(correct_stages)
    kept: tuple[str, ...] = ()
    checks_end = True
    started = 0  # schedules so far, over all instances of a class
    found_after: int | None = None  # schedules started when the first of them failed

    def __init__(self) -> None:
        super().__init__()
        type(self).started += 1
        self.group: ScheduledGroup | None = None

    @initialize(data=st.data())
    def choose_uses(self, data: st.DataObject) -> None:
        uses = []
        for number in range(USES):
            batch = data.draw(st.integers(1, 2))
            holds = data.draw(st.tuples(*[st.tuples(*[st.booleans()] * batch)] * self.ranks))
            uses.append(Use(number, holds))
        self.end = {"first": data.draw(st.integers(0, self.ranks - 1)), "late": data.draw(SECTION)}
        self.group = ScheduledGroup(self.ranks, self.route, tuple(uses), self.factory, self.kept)

    @rule(rank=st.integers(0, 3), times=st.integers(1, 3))
    def run_rank(self, rank: int, times: int) -> None:
        for _ in range(times):
            self.group.run(rank % self.ranks)

    @rule(
        pair=st.integers(0, 11),
        part=st.sampled_from((ALL_PARTS, *range(ALL_PARTS))),
        only=SECTION,
        times=st.integers(0, 2),
    )
    def deliver(self, pair: int, part: int, only: str | None, times: int) -> None:
        """Some of a writer's stores reach a peer, which may poll at once."""
        pairs = list(itertools.permutations(range(self.ranks), 2))
        writer, peer = pairs[pair % len(pairs)]
        self.group.deliver(writer, peer, part, only)
        for _ in range(times):
            self.group.run(peer)

    @rule(rank=st.integers(0, 3))
    def deliver_all_to(self, rank: int) -> None:
        peer = rank % self.ranks
        for writer in range(self.ranks):
            if writer != peer:
                self.group.deliver(writer, peer)

    @rule(rank=st.integers(0, 3), part=st.integers(0, ALL_PARTS))
    def land_rearms(self, rank: int, part: int) -> None:
        self.group.commit(rank % self.ranks, part)

    @rule(first=st.integers(0, 3), late=SECTION)
    def go_on(self, first: int, late: str | None) -> None:
        """Almost everything in flight arrives and every rank runs, so that schedules also reach the later uses."""
        self.group.round(first % self.ranks, late)

    def teardown(self) -> None:
        if self.group is None:
            return
        machine = type(self)
        failed = True
        try:
            if self.group.failed is None:
                self.group.drain(**self.end)
                if self.checks_end:
                    self.group.check_end()
                failed = False
        finally:
            self.group.close()
            if failed and machine.found_after is None:
                machine.found_after = machine.started


def search(machine: type[Schedules], schedules: int, phases: tuple[Phase, ...] = (Phase.generate,)) -> None:
    """Run `schedules` random schedules; raises the first violation (the shrunk one with Phase.shrink)."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=schedules,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("route", ["push", "local"])
def test_no_schedule_breaks_the_mailboxes(ranks: int, route: str) -> None:
    machine = type("CorrectStages", (Schedules,), {"ranks": ranks, "route": route})
    search(machine, CORRECT_SCHEDULES[ranks], (Phase.generate, Phase.shrink))
    assert machine.started >= CORRECT_SCHEDULES[ranks]


def _swap_generation(stage: Stage) -> StagesFactory:
    """Rank 1 takes the other generation at one stage."""

    class Swapped(CpuStages):
        def _use(self, at: Stage) -> tuple[int, int]:
            use, generation = super()._use(at)
            return use, 1 - generation if at is stage and self.rank == 1 else generation

    return lambda mailbox, _: Swapped(mailbox, 1.0)


class _OneGeneration(CpuStages):
    """All ranks use generation 0 only."""

    def _use(self, stage: Stage) -> tuple[int, int]:
        return super()._use(stage)[0], 0


class _LseIsTheFlag(CpuStages):
    """The merge takes an arrived LSE as the flag of the whole payload."""

    def merge(self, batch: int, after: Stage) -> torch.Tensor:
        snapshot = self.arrival.snapshot

        def without_payload(words, stage, use, locate, wanted=None):  # type: ignore[no-untyped-def]
            return words.clone() if wanted is not None else snapshot(words, stage, use, locate)

        self.arrival.snapshot = without_payload  # type: ignore[method-assign]
        try:
            return super().merge(batch, after)
        finally:
            del self.arrival.snapshot


class _EmptyRowsLeaveTheirQuery(CpuStages):
    """Rows of count 0 neither wait for their query words nor re-arm them."""

    def _attend(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> Partial:
        self._finish(Stage.QUERY)
        use, generation = self._use(Stage.SPARSE)
        own = self._query[self.rank][generation, : len(valid), : self.geometry.heads]
        full = valid > 0
        words = self.arrival.snapshot(own, Stage.SPARSE, use, self._locate_query, full[:, None, None])
        own.index_fill_(0, full.nonzero().squeeze(1), numerics.ARMED_WORD)
        return sparse_attention(words.view(torch.uint8), cache, rows, valid, self.geometry)


class _NaturalLse(CpuStages):
    """Rank 1 publishes its LSE to the base e."""

    def _push(self, stage: Stage, rows: torch.Tensor, lse_log2: torch.Tensor) -> None:
        super()._push(stage, rows, lse_log2 * numerics.LN_2 if self.rank == 1 else lse_log2)


def _push_twice(method: str) -> StagesFactory:
    """A method's stores are made twice, the second time as stores of their own (a retransmission)."""

    def factory(mailbox: Mailbox, group: ScheduledGroup) -> CpuStages:
        stages = CpuStages(mailbox, 1.0)
        once = getattr(stages, method)

        def twice(*arguments: object) -> None:
            once(*arguments)
            group.collect(stages.rank)
            once(*arguments)

        setattr(stages, method, twice)
        return stages

    return factory


def _simple(kind: type[CpuStages]) -> StagesFactory:
    return lambda mailbox, _: kind(mailbox, 1.0)


@dataclass(frozen=True)
class Bug:
    name: str
    factory: StagesFactory = correct_stages
    kept: tuple[str, ...] = ()
    route: str = "push"
    checks_end: bool = True
    found_as: tuple[str, ...] = ("wrong", "deadlock", "not armed")


PUSH_ROUTE = (Stage.TOPK, Stage.QUERY, Stage.SPARSE, Stage.MERGE)

# A word that is never re-armed is plain to see at the end of any schedule. Without that look it must be found by
# what it does: a stale word is read, or two ranks part ways and wait for ever.
BUGS = [
    *(Bug(f"never re-arms {section}, seen by its effect", kept=(section,), checks_end=False) for section in SECTIONS),
    *(Bug(f"never re-arms {section}", kept=(section,)) for section in SECTIONS),
    *(Bug(f"rank 1 swaps the generation of {stage.name}", _swap_generation(stage)) for stage in PUSH_ROUTE),
    Bug("rank 1 swaps the generation of PUSH", _swap_generation(Stage.PUSH), route="local"),
    Bug("one generation, no fence between re-arm and push", _simple(_OneGeneration)),
    Bug("LSE taken as the payload's flag", _simple(_LseIsTheFlag), found_as=("wrong", "not armed")),
    Bug("select_push stores twice", _push_twice("select_push")),
    Bug("query_push stores twice", _push_twice("query_push")),
    Bug("values stored twice", _push_twice("_push")),
    Bug("empty rows leave their query words", _simple(_EmptyRowsLeaveTheirQuery)),
    Bug("empty rows leave their query words, seen by its effect", _simple(_EmptyRowsLeaveTheirQuery), checks_end=False),
    Bug("LSE to the base e", _simple(_NaturalLse), found_as=("wrong merged row",)),
    Bug("LSE to the base e", _simple(_NaturalLse), found_as=("wrong merged row",), route="local"),
]


def _find(bug: Bug) -> tuple[int, Violation]:
    """How many schedules it took, and what was found."""
    injected = {
        "factory": staticmethod(bug.factory),
        "kept": bug.kept,
        "route": bug.route,
        "checks_end": bug.checks_end,
    }
    machine = type("Buggy", (Schedules,), injected)
    with pytest.raises(Violation) as found:
        search(machine, BUGGY_SCHEDULES)
    return machine.found_after, found.value


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.name} ({bug.route})")
def test_injected_bugs_are_found(bug: Bug) -> None:
    schedules, violation = _find(bug)
    assert 1 <= schedules <= BUGGY_SCHEDULES
    print(f"\n{bug.name} ({bug.route}): schedule {schedules}: {violation}")
    assert str(violation).startswith(bug.found_as)
