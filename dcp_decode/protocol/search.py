"""Exhaustive search of a model's states, with a reduction that loses no way to end.

The search goes breadth first. Every step is taken at most once, so a state's distance from the start is the number of
steps (and passed polls) in it: equal states are always found in the same layer, and only two layers are held at once.

**Reduction.** In each state a *stubborn set* of steps is built, and only its enabled members are followed
(Valmari, "Stubborn sets for reduced state space generation", 1991). Starting with one enabled step:

* every enabled step that does not commute with a member is a member too;
* every disabled step that does not commute with a member must be *blocked*: it can't be taken before a member is.
  Either a member must come before it, or something that must come before it is a poll with nothing to see, and every
  push that could change that is blocked. If one is not blocked, the set is given up, at worst for all enabled steps.

Such a set keeps every state in which no step can be taken. The violations that a step can cause are about the values
that its thread has seen or the order of two stores: they stay true however the run goes on, and commuting steps do not
change them. So some reduced run shows each of them as well. ``reduce=False`` follows every enabled step instead;
the tests compare the two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from dcp_decode.protocol.model import Model
from dcp_decode.protocol.state import State
from dcp_decode.protocol.steps import POLLS, bits
from dcp_decode.protocol.wording import describe

Choice = tuple[int, int]
"""A step and which of its outcomes."""


@dataclass(frozen=True)
class Verdict:
    """What a search has found."""

    states: int
    violated: str
    """The violated property, or nothing."""
    choices: tuple[Choice, ...] = ()
    """The run that violates it."""
    ends: frozenset[State] = field(default=frozenset(), repr=False)
    """The states in which no step can be taken, where they were asked for."""

    @property
    def safe(self) -> bool:
        return not self.violated


class TooManyStatesError(RuntimeError):
    """A search was larger than it was allowed to be: it proves nothing."""


def search(
    model: Model,
    *,
    reduce: bool = True,
    keep_ends: bool = False,
    assertion: Callable[[State], bool] | None = None,
    limit: int = 5_000_000,
) -> Verdict:
    """Visit every state (up to the reduction) until a property is violated.

    ``assertion`` is one more property of every visited state. Under the reduction only an assertion that stays false
    once it is false is sure to be caught.
    """
    states = 1
    layer = [model.initial()]
    origins: list[list[tuple[int, Choice]]] = []
    ends: set[State] = set()
    while layer:
        following: dict[State, int] = {}
        origin: list[tuple[int, Choice]] = []
        for index, state in enumerate(layer):
            if assertion is not None and not assertion(state):
                return Verdict(states, "assertion", _trace_back(origins, index))
            steps = stubborn_steps(model, state) if reduce else enabled_steps(model, state)
            if not steps:
                if keep_ends:
                    ends.add(state)
                violated = model.judge_end(state)[1]
                if violated:
                    return Verdict(states, violated, _trace_back(origins, index))
            for number in steps:
                for which, outcome in enumerate(model.outcomes(state, number)):
                    choice = number, which
                    if outcome.violated:
                        return Verdict(states, outcome.violated, (*_trace_back(origins, index), choice))
                    if outcome.state not in following:
                        following[outcome.state] = len(origin)
                        origin.append((index, choice))
                        states += 1
        if states > limit:
            raise TooManyStatesError(f"more than {limit} states")
        layer = list(following)
        origins.append(origin)
    return Verdict(states, "", ends=frozenset(ends))


def _trace_back(origins: list[list[tuple[int, Choice]]], index: int) -> tuple[Choice, ...]:
    choices: list[Choice] = []
    for origin in reversed(origins):
        index, choice = origin[index]
        choices.append(choice)
    return tuple(reversed(choices))


def enabled_steps(model: Model, state: State) -> list[int]:
    """Every step that can be taken."""
    return [number for number in bits(model.all_done & ~state.done) if model.enabled(state, number)]


def stubborn_steps(model: Model, state: State) -> list[int]:
    """The enabled steps of a small stubborn set: one step wherever a single one will do."""
    enabled: list[int] = []
    best: list[int] = []
    for seed in bits(model.all_done & ~state.done):
        if not model.enabled(state, seed):
            continue
        enabled.append(seed)
        members = _close(model, state, seed)
        if members is not None and (len(members) < len(best) or not best):
            best = members
            if len(best) == 1:
                return best
    return best or enabled


def _close(model: Model, state: State, seed: int) -> list[int] | None:
    """The enabled members of a stubborn set around ``seed``; None where none is found that is worth having."""
    undone = model.all_done & ~state.done
    members = [seed]
    mask = 1 << seed
    pending = [seed]
    while pending:
        outside = _conflicts(model, state, pending.pop()) & undone & ~mask
        for number in bits(outside):
            if model.enabled(state, number):
                members.append(number)
                mask |= 1 << number
                pending.append(number)
    blocked = _Blocked(model, state, mask)
    for member in members:
        if not all(blocked(number) for number in bits(_conflicts(model, state, member) & undone & ~mask)):
            return None
    return sorted(members)


def _conflicts(model: Model, state: State, number: int) -> int:
    return 0 if model.touches_nothing(state, number) else model.table.conflicts[number]


class _Blocked:
    """Which steps can't be taken before one of the steps ``mask`` is, from this state on."""

    def __init__(self, model: Model, state: State, mask: int) -> None:
        self.model = model
        self.state = state
        self.mask = mask
        self.undone = model.all_done & ~state.done
        self.known = dict.fromkeys(bits(mask), True)

    def __call__(self, number: int) -> bool:
        answer = self.known.get(number)
        if answer is None:
            self.known[number] = False  # steps that only wait for each other are not blocked by the set
            answer = self.known[number] = self._decide(number)
        return answer

    def _decide(self, number: int) -> bool:
        model, table = self.model, self.model.table
        step = model.steps[number]
        missing = table.all_before[number] & self.undone
        if table.before_unless_empty[number] and model.has_keys(self.state, step):
            missing |= table.row_before[number] & self.undone
        if missing & self.mask:
            return True
        polls = missing & table.polls
        # Only a poll waits for another thread, so only a poll can be blocked by something that is not before it.
        return (step.kind in POLLS and self._starved(number)) or any(self._starved(poll) for poll in bits(polls))

    def _starved(self, number: int) -> bool:
        """Whether a poll has nothing to see, and every push that could change that is blocked."""
        if not self.model.nothing_pending(self.state, number):
            return False
        pushes = self.model.table.feeds[number] & self.undone
        first = pushes & -pushes
        # A push that comes after the first one of the same word is blocked with it.
        return all(
            self(push) for push in bits(pushes) if push == first.bit_length() - 1 or not self._follows(push, first)
        )

    def _follows(self, number: int, first: int) -> bool:
        return bool(self.model.table.all_before[number] & first)


def replay(model: Model, choices: tuple[Choice, ...]) -> tuple[list[str], str] | None:
    """Take the steps of a run again: its lines and the violated property, if any. None: some step can't be taken."""
    state = model.initial()
    lines: list[str] = []
    for number, which in choices:
        if not model.enabled(state, number):
            return None
        outcomes = model.outcomes(state, number)
        if which >= len(outcomes):
            return None
        outcome = outcomes[which]
        lines.append(
            describe(model.rules, model.size, model.steps[number]) + (f": {outcome.note}" if outcome.note else "")
        )
        if outcome.violated:
            return lines, outcome.violated
        state = outcome.state
    if enabled_steps(model, state):
        return lines, ""
    note, violated = model.judge_end(state)
    return [*lines, *note.split("; ")] if note else lines, violated


def shorten(model: Model, verdict: Verdict) -> tuple[Choice, ...]:
    """Leave out every step of a violating run that the violation does not need.

    A run that ends in waiting is left as it is: it has to show that no step is left.
    """
    choices = verdict.choices
    played = replay(model, choices)
    if played is None or not played[1] or not _violates_at_last_step(model, choices):
        return choices
    index = len(choices) - 2
    while index >= 0:
        shorter = choices[:index] + choices[index + 1 :]
        if (again := replay(model, shorter)) is not None and again[1] == verdict.violated:
            choices = shorter
        index -= 1
    return choices


def _violates_at_last_step(model: Model, choices: tuple[Choice, ...]) -> bool:
    before = replay(model, choices[:-1])
    return before is not None and not before[1]
