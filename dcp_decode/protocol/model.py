"""What each step does: mailboxes in a weak memory, and the properties that every step is checked against.

The memory follows the PTX model rather than one machine. A word of a mailbox is the list of the stores to it in
*coherence order*; nothing else orders stores to different words. A thread has a *view*: the set of steps that precede
it in *causality order*. Three rules give the freedom that the hardware has, and no more:

* a store takes any place in the coherence order that comes after all stores to that word in its thread's view;
* a load returns any store that is not older than the newest store to that word in its thread's view;
* a view grows by program order, by barriers, by kernel order (through a dependency wait), and by *release* and
  *acquire*: a push carries the view that its thread had at its last fence (nothing, without one), and a poll passes
  on what the push carries only if the polling thread executes a fence afterwards.

So a re-arm that is still on its way, a stale load and a store that overtakes another are one mechanism. A load never
returns a store that has not been issued; see ``docs/protocol.md`` for why that loses nothing here.

States are immutable tuples. Two kinds of history are forgotten because no step can depend on them: stores older than
one that every view contains, and (with ``forget``) whether a payload word was skipped once its slot has been merged.
"""

from collections.abc import Sequence

from dcp_decode.protocol.fences import acquires, releases
from dcp_decode.protocol.layout import Layout
from dcp_decode.protocol.rules import Counter, Credit, EmptyRow, MergeWait, PollFence, Rules, SecondRead, Size
from dcp_decode.protocol.state import (
    DEADLOCK,
    LEFT_OVER,
    LOST_PUSH,
    STALE_ROW,
    TORN_ROW,
    Memory,
    Outcome,
    State,
    Store,
    newest,
    replaced,
)
from dcp_decode.protocol.steps import ARMS, LOCAL, POLLS, STORES, Kind, Step, StepTable, bits
from dcp_decode.protocol.wording import describe


class Model:
    """The transition system of ``rules`` at ``size``."""

    def __init__(self, rules: Rules, size: Size, *, forget: bool = True) -> None:
        self.rules = rules
        self.size = size
        self.table = StepTable(rules, size)
        self.steps = self.table.steps
        self.forget = forget and not rules.missing_wait
        self.all_done = (1 << self.table.count) - 1
        self.layout = Layout(size, rules.credit is not Credit.NONE)
        self._cells = [0 if step.kind in LOCAL else self.layout.cell(step.word) for step in self.steps]

    def initial(self) -> State:
        """All mailboxes armed, nothing begun, nobody knows anything of anybody."""
        ranks = self.size.ranks
        return State(
            done=0,
            passed=0,
            empty=0,
            void=0,
            kernels=(-1,) * ranks,
            starts=(0,) * (3 * ranks),
            views=(0,) * (3 * ranks),
            groups=(0,) * (2 * ranks * ranks),
            counters=(0,) * (3 * ranks),
            numbers=(0,) * self.layout.numbers,
            memory=((),) * (self.rules.generations * self.layout.cells),
        )

    def _slot(self, number: int) -> int:
        """Index of a step's kernel among the three newest of its rank: where its start and view are kept."""
        return 3 * self.steps[number].rank + self.table.kernels[number] % 3

    def _place(self, state: State, number: int) -> int:
        """Index into the memory of the word that a step touches, in the generation that its CTA takes."""
        step = self.steps[number]
        if self.rules.numbers_are_right:
            generation = self.rules.generation(step.use)
        else:
            generation = state.numbers[self.layout.number(step)] % self.rules.generations
        return generation * self.layout.cells + self._cells[number]

    # Which steps can be taken -----------------------------------------------------------------------------------------

    def ready(self, state: State, number: int) -> bool:
        """Whether a step's thread has come to it (a poll may still have nothing to see)."""
        table = self.table
        undone = ~state.done
        if table.before[number] & undone or not undone >> number & 1:
            return False
        unless_empty = table.before_unless_empty[number]
        return not unless_empty & undone or bool(state.empty >> self.layout.row(self.steps[number]) & 1)

    def enabled(self, state: State, number: int) -> bool:
        """Whether a step can be taken now."""
        if not self.ready(state, number):
            return False
        step = self.steps[number]
        if step.kind is Kind.POLL_QUERY:
            return self._ignores_words(state, step) or self._something_to_see(state, number)
        if step.kind is Kind.POLL_VALUE:
            return self._unchecked(state, step) or self._something_to_see(state, number)
        return step.kind is not Kind.POLL_CREDIT or self._something_to_see(state, number)

    def _something_to_see(self, state: State, number: int) -> bool:
        return any(not self._is_arm(store) for store in self._visible(state, number))

    def touches_nothing(self, state: State, number: int) -> bool:
        """Whether a step that can be taken leaves every mailbox alone, because there is no payload for it."""
        step = self.steps[number]
        if step.index == self.size.words:
            return False
        if step.kind is Kind.PUSH_VALUE:
            return bool(state.empty >> self.layout.row(step) & 1)
        return step.kind is Kind.POLL_VALUE and bool(state.void >> self.layout.row(step) & 1)

    def has_keys(self, state: State, step: Step) -> bool:
        """Whether the row of a step of stage 2 is known to have keys."""
        counted = self.table.counts[step.rank, step.peer, step.use]
        return bool(state.done >> counted & 1) and not state.empty >> self.layout.row(step) & 1

    def nothing_pending(self, state: State, number: int) -> bool:
        """Whether a poll can find nothing unless one more push of its word is issued, now or when it begins.

        The values that the word has held do not count: their re-arm is in kernel order before the poll.
        """
        step = self.steps[number]
        if step.stage == 2 and self.rules.empty_row is not EmptyRow.CONSUME and not self.has_keys(state, step):
            return False
        payload = step.stage == 3 and step.index < self.size.words
        if payload and self.rules.merge_wait is MergeWait.LSE_ONLY:
            return False
        if payload and self.rules.merge_wait is MergeWait.LSE_THEN_PAYLOAD and not self._lse_taken(state, number):
            # The poll may turn out to need no push, unless the row is known to have keys and is not pushed yet.
            pushed = self.table.push_of[step.word, step.use]
            if state.done >> pushed & 1 or not self.has_keys(state, self.steps[pushed]):
                return False
        if self.ready(state, number):
            return not self.enabled(state, number)
        if not self.rules.numbers_are_right:
            return False
        before = self.table.all_before[number]
        for store in reversed(state.memory[self._place(state, number)]):
            if not self._is_arm(store):
                return False
            if before >> store.step & 1:
                return True
        return True

    def _lse_taken(self, state: State, number: int) -> bool:
        return bool(state.done & self.table.lse_poll[number])

    def _ignores_words(self, state: State, step: Step) -> bool:
        """Whether an empty row leaves its query words unread."""
        return self.rules.empty_row is not EmptyRow.CONSUME and bool(state.empty >> self.layout.row(step) & 1)

    def _unchecked(self, state: State, step: Step) -> bool:
        """Whether stage 3 does not wait for this payload word: its slot is empty, or only the LSE is polled."""
        if step.index == self.size.words or self.rules.merge_wait is MergeWait.PAYLOAD_THEN_LSE:
            return False
        return self.rules.merge_wait is MergeWait.LSE_ONLY or bool(state.void >> self.layout.row(step) & 1)

    def _is_arm(self, store: Store) -> bool:
        return self.steps[store.step].kind in ARMS

    def _oldest_visible(self, state: State, number: int) -> int:
        """Index of the oldest store that a load may return; -1: the armed word of the beginning."""
        step = self.steps[number]
        stores = state.memory[self._place(state, number)]
        view = state.starts[self._slot(number)]
        if step.kind is Kind.READ_QUERY and self.rules.second_read is SecondRead.UNORDERED:
            # Two loads of one word by one thread: the second returns nothing older than the first did.
            view |= state.groups[self.layout.group(step)]
        oldest = newest(stores, view)
        return max(oldest, self._newest_arm(stores)) if state.passed >> number & 1 else oldest

    def _visible(self, state: State, number: int) -> Memory:
        """The stores that a load may return, in coherence order."""
        return state.memory[self._place(state, number)][max(self._oldest_visible(state, number), 0) :]

    def _newest_arm(self, stores: Sequence[Store]) -> int:
        """Index of the last re-arm of a coherence order; -1: none."""
        return max((index for index, store in enumerate(stores) if self._is_arm(store)), default=-1)

    # What the steps do ------------------------------------------------------------------------------------------------

    def outcomes(self, state: State, number: int) -> list[Outcome]:
        """All ways in which an enabled step can go."""
        step = self.steps[number]
        if step.kind is Kind.BEGIN:
            return [Outcome(self._begin(state, number), "", "")]
        if step.kind is Kind.COUNT_USE:
            counters = list(state.counters)
            counters[3 * step.rank + step.cta - 1] += 1
            return [Outcome(self._after(state, number)._replace(counters=tuple(counters)), "", "")]
        if step.kind is Kind.COUNT_KEYS:
            after = self._after(state, number)
            row = 1 << self.layout.row(step)
            full = Outcome(after._replace(empty=after.empty & ~row), "some", "")
            if not self.size.empty_rows:
                return [full]
            return [full, Outcome(after._replace(empty=after.empty | row), "none, the row is empty", "")]
        if step.kind in STORES:
            return self._store(state, number)
        return self._load(state, number)

    def _after(self, state: State, number: int, gained: int = 0) -> State:
        """The step is done; the views of its stage gain it and ``gained``."""
        step = self.steps[number]
        views = list(state.views)
        views[self._slot(number)] |= gained | 1 << number
        after = state._replace(done=state.done | 1 << number, views=tuple(views))
        if not self.forget or step.stage == 1 or self.table.siblings[number] & ~after.done:
            return after
        # The last step of a row or a slot: its own state has served its purpose.
        row = ~(1 << self.layout.row(step))
        groups = list(state.groups)
        groups[self.layout.group(step)] = 0
        if step.stage == 2:
            return after._replace(empty=state.empty & row, groups=tuple(groups))
        return after._replace(void=state.void & row, groups=tuple(groups))

    def _begin(self, state: State, number: int) -> State:
        step = self.steps[number]
        rank = step.rank
        kernel = self.table.kernels[number]
        place = self._slot(number)
        # Without the wait a stage knows only what the grid before it knew at its own start.
        behind = 2 if self.rules.missing_wait == step.stage else 1
        starts = list(state.starts)
        starts[place] = state.views[3 * rank + (kernel - behind) % 3] if kernel >= behind else 0
        numbers = list(state.numbers)
        if self.rules.counter is not Counter.BAKED:
            use = state.counters[3 * rank + self.table.counted_stage(step) - 1]
            numbers[self.layout.number(step)] = use
            if self.rules.numbers_are_right and use != step.use:
                raise AssertionError(f"wrong use number {use}, which the reduction rules out: {step}")
        kernels = list(state.kernels)
        kernels[rank] = max(kernels[rank], kernel)
        after = self._after(state, number, starts[place])._replace(
            starts=tuple(starts), numbers=tuple(numbers), kernels=tuple(kernels)
        )
        if not self.forget:
            return after
        everybody = self._everybody(after)
        return after._replace(memory=tuple(self._trim(stores, everybody) for stores in state.memory))

    def _everybody(self, state: State) -> int:
        """What every running and every future thread has in its view."""
        common = -1
        for rank, kernel in enumerate(state.kernels):
            common &= state.starts[3 * rank + kernel % 3] if kernel >= 0 else 0
        return common

    def _trim(self, stores: Memory, everybody: int) -> Memory:
        known = newest(stores, everybody)
        if known < 0:
            return stores
        return stores[known + 1 :] if self._is_arm(stores[known]) else stores[known:]

    def _store(self, state: State, number: int) -> list[Outcome]:
        step = self.steps[number]
        start = state.starts[self._slot(number)]
        # The warp that pushes credit, and what it has polled of it, stand beside the row's barrier.
        beside = step.stage == 1 or step.kind is Kind.PUSH_CREDIT
        group = 0 if beside else state.groups[self.layout.group(step)]
        if step.kind in (Kind.ARM_QUERY, Kind.ARM_CREDIT):
            # Of what the row's readers have seen, only this word decides where its re-arm may go. Nothing else of it
            # is taken, so that a re-arm commutes with the polls of other words.
            group &= self.table.feeds[number]
        empty = step.stage == 2 and bool(state.empty >> self.layout.row(step) & 1)
        is_lse = step.kind is Kind.PUSH_VALUE and step.index == self.size.words
        if step.kind is Kind.PUSH_VALUE and empty and not is_lse:
            return [Outcome(self._after(state, number, start), "nothing: the row is empty", "")]
        if step.kind is Kind.ARM_QUERY and empty and self.rules.empty_row is EmptyRow.SKIP:
            return [Outcome(self._after(state, number, start), "nothing: the row is empty", "")]
        if step.kind is Kind.ARM_VALUE and state.void >> self.layout.row(step) & 1 and step.index < self.size.words:
            return [Outcome(self._skip_arm(state, number, start | group), "nothing: the slot is empty", "")]
        # An empty row may push before its polls, so its pushes know nothing of them.
        early = empty and step.kind is Kind.PUSH_VALUE and not self.rules.empty_push_after_polls
        view = start if early else start | group
        if step.kind is Kind.ARM_QUERY and self.rules.value_push_after_rearm:
            state = self._join(state, step, 1 << number)
        after = self._after(state, number, view)
        store = Store(number, empty and is_lse, view if releases(self.rules, step) else 0)
        place = self._place(state, number)
        stores = state.memory[place]
        outcomes = []
        for position in range(len(stores), newest(stores, view), -1):
            below = stores[:position]
            note, violated = self._judge_store(stores, position, step)
            if self.forget and step.kind is Kind.ARM_VALUE and below:
                # The word's only reader has it. What it said is of no use to anyone now.
                below = (*below[:-1], Store(below[-1].step, False, 0))
            changed = (*below, store, *stores[position:])
            if self.forget:
                changed = self._trim(changed, self._everybody(after))
            outcomes.append(Outcome(after._replace(memory=replaced(state.memory, place, changed)), note, violated))
        return outcomes

    def _judge_store(self, stores: Memory, position: int, step: Step) -> tuple[str, str]:
        """Whether a store at this place of the coherence order makes a push unreadable."""
        is_arm = step.kind in ARMS
        if is_arm and position:
            below = self.steps[stores[position - 1].step]
            if below.kind not in ARMS and below.use != step.use:
                return f"the re-arm of use {step.use} lands on top of the push of use {below.use}", LOST_PUSH
        if not is_arm and position < len(stores):
            above = self.steps[stores[position].step]
            if above.use != step.use:
                what = "re-arm" if self._is_arm(stores[position]) else "push"
                return f"the {what} of use {above.use} is not ordered before it and lands on top of it", LOST_PUSH
        return "", ""

    def _skip_arm(self, state: State, number: int, view: int) -> State:
        """A payload word that never came needs no re-arm.

        Where nothing is pending on the word, record the skip as the push and re-arm of a full row would have been:
        that state is reached anyway by the full row, and it allows everything that the word left alone would.
        """
        after = self._after(state, number, view)
        place = self._place(state, number)
        stores = state.memory[place]
        if not self.forget or newest(stores, view) != len(stores) - 1:
            return after
        step = self.steps[number]
        pushed = self.table.push_of[step.word, step.use]
        both = (*stores, Store(pushed, False, 0), Store(number, False, 0))
        changed = self._trim(both, self._everybody(after))
        return after._replace(memory=replaced(state.memory, place, changed))

    def _join(self, state: State, step: Step, view: int) -> State:
        """Pass ``view`` through the barrier of the step's row or slot."""
        groups = list(state.groups)
        groups[self.layout.group(step)] |= view
        return state._replace(groups=tuple(groups))

    def _load(self, state: State, number: int) -> list[Outcome]:
        step = self.steps[number]
        start = state.starts[self._slot(number)]
        if step.stage == 2 and self._ignores_words(state, step):
            return [Outcome(self._after(state, number, start), "nothing: the row is empty", "")]
        if step.stage == 3 and step.index < self.size.words and state.void >> self.layout.row(step) & 1:
            after = self._after(state, number, start)
            if self.forget:
                pushed = 1 << self.table.push_of[step.word, step.use]
                after = self._join(self._after(state, number, start | pushed), step, pushed)
            return [Outcome(after, "nothing: the slot is empty", "")]
        polls = step.kind in POLLS and not (step.kind is Kind.POLL_VALUE and self._unchecked(state, step))
        visible = self._visible(state, number)
        outcomes = [self._take(state, number, store) for store in visible if not (polls and self._is_arm(store))]
        if polls:
            overtaken = any(not self._is_arm(store) for store in visible[: self._newest_arm(visible) + 1])
            if overtaken:
                passed = state._replace(passed=state.passed | 1 << number)
                outcomes.append(Outcome(passed, "sees the word re-armed already, polls on", ""))
        elif self._oldest_visible(state, number) < 0:
            outcomes.append(self._armed(state, number))
        return outcomes

    def _armed(self, state: State, number: int) -> Outcome:
        return Outcome(self._after(state, number), "takes an armed word for data", TORN_ROW)

    def _take(self, state: State, number: int, store: Store) -> Outcome:
        """A load returns ``store``."""
        step = self.steps[number]
        if self._is_arm(store):
            return self._armed(state, number)
        found = self.steps[store.step]
        seen = 1 << store.step
        acquired = store.carries if acquires(self.rules, step) else 0
        after = self._after(state, number, state.starts[self._slot(number)] | seen | acquired)
        to_group = acquired if self.rules.poll_fence is PollFence.BEFORE_BARRIER or step.stage == 3 else 0
        after = self._join(after, step, seen | to_group)
        if step.stage == 3 and step.index == self.size.words:
            slot = 1 << self.layout.row(step)
            void = store.empty and found.use == step.use
            after = after._replace(void=after.void | slot if void else after.void & ~slot)
        if found.use < step.use:
            return Outcome(after, f"takes the value of use {found.use}", STALE_ROW)
        if found.use > step.use:
            return Outcome(after, f"takes the value of use {found.use}: its own is overwritten", LOST_PUSH)
        return Outcome(after, "", "")

    # How a run ends ---------------------------------------------------------------------------------------------------

    def judge_end(self, state: State) -> tuple[str, str]:
        """Judge a state in which no step can be taken: a note and the violated property, or nothing."""
        if state.done != self.all_done:
            waits = [self.steps[number] for number in bits(~state.done & self.all_done) if self.ready(state, number)]
            return "; ".join(describe(self.rules, self.size, step) + ": waits for ever" for step in waits), DEADLOCK
        for place, stores in enumerate(state.memory):
            if stores and not self._is_arm(stores[-1]):
                step = self.steps[stores[-1].step]
                generation = place // self.layout.cells
                return f"generation {generation} still holds: {describe(self.rules, self.size, step)}", LEFT_OVER
        return "", ""
