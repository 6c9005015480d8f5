"""The state of a run as immutable tuples, and the properties that are checked."""

from typing import NamedTuple

STALE_ROW = "no stale row"
TORN_ROW = "no torn row"
LOST_PUSH = "no lost push"
DEADLOCK = "every wait ends"
LEFT_OVER = "mailboxes end as new"
PROPERTIES = (STALE_ROW, TORN_ROW, LOST_PUSH, DEADLOCK, LEFT_OVER)


class Store(NamedTuple):
    """One store in a word's coherence order."""

    step: int
    empty: bool
    """Whether the value is EMPTY_LSE."""
    carries: int
    """The view that a poll of this store can acquire."""


Memory = tuple[Store, ...]
"""A word of a mailbox: the stores to it in coherence order."""


class State(NamedTuple):
    """Everything that a later step can depend on. Masks are over step numbers unless said otherwise."""

    done: int
    passed: int
    """Polls that have already seen the re-arm of the very value they wait for, and so can't see that value again."""
    empty: int
    """Rows without keys, one bit each, row = holder * ranks + owner."""
    void: int
    """Value slots whose LSE word said EMPTY_LSE, one bit each, slot = owner * ranks + source."""
    kernels: tuple[int, ...]
    """Per rank: the newest kernel that has begun."""
    starts: tuple[int, ...]
    """Per rank and kernel modulo 3: the view that the dependency wait gave to the kernel's threads."""
    views: tuple[int, ...]
    """Per rank and kernel modulo 3: the union of the views of the kernel's threads."""
    groups: tuple[int, ...]
    """Views behind the barrier of each row's cluster (stage 2), then of each slot's threads (stage 3)."""
    counters: tuple[int, ...]
    """Per rank and stage: the use number in device memory."""
    numbers: tuple[int, ...]
    """Per CTA: the use number it has read."""
    memory: tuple[Memory, ...]


class Outcome(NamedTuple):
    """One way a step can go."""

    state: State
    note: str
    """What happened in words, where it is not the ordinary thing."""
    violated: str
    """The violated property, or nothing."""


def newest(stores: Memory, view: int) -> int:
    """Index of the newest store of a coherence order that a view contains; -1: none."""
    for index in range(len(stores) - 1, -1, -1):
        if view >> stores[index].step & 1:
            return index
    return -1


def replaced(memory: tuple[Memory, ...], place: int, stores: Memory) -> tuple[Memory, ...]:
    """A memory with one word's coherence order replaced."""
    return (*memory[:place], stores, *memory[place + 1 :])
