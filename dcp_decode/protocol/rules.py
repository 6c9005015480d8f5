"""The rules of the mailbox protocol as data: what a variant may change, and how large a model of it is.

Every field of :class:`Rules` is one decision of the protocol. The default value is the decision that the harness
takes; another value is a variant that :mod:`dcp_decode.protocol.variants` asks the checker about.
"""

from dataclasses import dataclass
from enum import StrEnum


class Counter(StrEnum):
    """Who increments the use number of a stage, or what stands in for it."""

    NEXT_STAGE = "next_stage"  # one thread of the next stage, after its dependency wait
    FIRST_CTA_STARTS = "first_cta_starts"  # the stage's own first CTA, as soon as it has read the number
    FIRST_CTA_ENDS = "first_cta_ends"  # the stage's own first CTA, when its own work is done
    LAST_CTA_ENDS = "last_cta_ends"  # the stage's own last CTA, when all CTAs' work is done
    LAST_CTA_READS = "last_cta_reads"  # the last CTA to read the number, as soon as it has
    BAKED = "baked"  # no counter: the host chose the generation when the graph was captured


class Launches(StrEnum):
    """How many kernels a use has."""

    STAGES = "stages"  # three
    FUSED = "fused"  # one: its CTAs are those of all three stages
    IN_TURN = "in_turn"  # three in even uses, one in odd ones


class Credit(StrEnum):
    """A word of its own for each pair of ranks, pushed and polled by one warp of the grid that holds stage 2.

    Where it carries the order of the re-arms (in fused uses, or in all if none is), no other thread fences.
    """

    NONE = "none"
    FENCED = "fenced"  # pushed after a fence behind the dependency wait, and the poll is followed by another
    NO_PUSH_FENCE = "no_push_fence"
    NO_POLL_FENCE = "no_poll_fence"


class PushFence(StrEnum):
    """Which threads of stage 1 execute ``fence.acq_rel.sys``, and when."""

    EVERY_THREAD = "every_thread"  # every pushing thread, after its dependency wait and before its push
    ONE_PER_DESTINATION = "one_per_destination"  # only the thread that pushes the first word to a rank
    ONE_THREAD = "one_thread"  # one thread of the whole grid
    BEFORE_WAIT = "before_wait"  # every pushing thread, but before the dependency wait
    NONE = "none"


class PollFence(StrEnum):
    """Which polling threads of stage 2 execute ``fence.acq_rel.sys`` after their last poll, and when."""

    AT_EXIT = "at_exit"  # every one, at the latest before the kernel ends
    BEFORE_BARRIER = "before_barrier"  # every one, before the cluster barrier, hence before any push of the row
    ONE_PER_ROW = "one_per_row"  # one polling thread for each source rank, before the kernel ends
    NONE = "none"


class Rearm(StrEnum):
    """Which readers of a query word arm it again, and after which reads."""

    ONE_AFTER_ALL = "one_after_all"
    ONE_AFTER_OWN = "one_after_own"
    EVERY_AFTER_ALL = "every_after_all"
    EVERY_AFTER_OWN = "every_after_own"
    NEVER = "never"


class EmptyRow(StrEnum):
    """What stage 2 does with the query words of a row for which this rank holds no key."""

    CONSUME = "consume"  # waits for them and re-arms them
    SKIP = "skip"  # leaves them alone
    REARM_BLINDLY = "rearm_blindly"  # re-arms them without having waited


class QueryCheck(StrEnum):
    """Which words of a query row a reader polls."""

    EVERY_WORD = "every_word"
    FIRST_WORD = "first_word"


class SecondRead(StrEnum):
    """Whether a reader loads a query word again from the mailbox after the poll that saw it arrive."""

    NEVER = "never"  # the checked word is the used word
    UNORDERED = "unordered"  # a second load that the re-arm does not wait for
    ASYNC_PROXY = "async_proxy"  # a bulk copy before the re-arm, unordered with the poll (another proxy)


class MergeWait(StrEnum):
    """What stage 3 polls, and in which order."""

    LSE_THEN_PAYLOAD = "lse_then_payload"
    PAYLOAD_THEN_LSE = "payload_then_lse"
    LSE_ONLY = "lse_only"  # the LSE word stands for the whole row: payload words are read unchecked


@dataclass(frozen=True)
class Rules:
    """One protocol. The defaults are the protocol of the harness."""

    generations: int = 2
    launches: Launches = Launches.STAGES
    counter: Counter = Counter.NEXT_STAGE
    fused_counter: Counter = Counter.LAST_CTA_READS
    """Who increments the use numbers (of all stages) in a fused use."""
    baked: tuple[int, ...] = ()
    """Generation of each use, where ``counter`` is ``BAKED``."""
    missing_wait: int = 0
    """The stage (1, 2, 3) whose CTAs do not execute their dependency wait; 0: all do."""
    credit: Credit = Credit.NONE
    waits_before_pushes: bool = False
    """Whether the CTAs of a fused use wait for all their query words before they push any."""
    push_fence: PushFence = PushFence.EVERY_THREAD
    poll_fence: PollFence = PollFence.AT_EXIT
    merge_poll_fence: bool = True
    """Whether the polling threads of stage 3 execute a fence after their last poll."""
    value_push_fence: bool = False
    """Whether the pushing threads of stage 2 execute a fence before they push."""
    value_push_after_rearm: bool = False
    """Whether stage 2 pushes a row only after a barrier that follows the re-arm of the row's query words."""
    empty_push_after_polls: bool = False
    """Whether stage 2 pushes EMPTY_LSE only after it has the row's query words, or at any time after its start."""
    rearm: Rearm = Rearm.ONE_AFTER_ALL
    empty_row: EmptyRow = EmptyRow.CONSUME
    query_check: QueryCheck = QueryCheck.EVERY_WORD
    second_read: SecondRead = SecondRead.NEVER
    merge_wait: MergeWait = MergeWait.LSE_THEN_PAYLOAD

    def __post_init__(self) -> None:
        if self.generations < 1:
            raise ValueError(f"generations must be at least 1, got {self.generations}")
        if self.missing_wait not in (0, 1, 2, 3):
            raise ValueError(f"missing_wait must name a stage or be 0, got {self.missing_wait}")
        if (self.counter is Counter.BAKED) != bool(self.baked):
            raise ValueError("baked generations go with the baked counter, and only with it")
        if self.missing_wait and self.launches is not Launches.STAGES:
            raise ValueError("a stage's missing wait is modelled where each stage is launched on its own")

    @property
    def numbers_are_right(self) -> bool:
        """Whether every CTA can only read the number of its own use (the model refuses to go on if one does not)."""
        right = (Counter.NEXT_STAGE, Counter.LAST_CTA_READS, Counter.LAST_CTA_ENDS, Counter.BAKED)
        return self.counter in right and self.fused_counter in right and not self.missing_wait

    def fused(self, use: int) -> bool:
        """Whether a use is one kernel."""
        return self.launches is Launches.FUSED or (self.launches is Launches.IN_TURN and use % 2 == 1)

    def has_credit(self, use: int) -> bool:
        """Whether credit words carry the order of the re-arms in a use."""
        return self.credit is not Credit.NONE and (self.fused(use) or self.launches is Launches.STAGES)

    def generation(self, use: int) -> int:
        """The generation of a use, where its number is right."""
        return self.baked[use] if self.counter is Counter.BAKED else use % self.generations


@dataclass(frozen=True)
class Size:
    """How large a model is: the numbers the search is exhaustive for."""

    ranks: int
    words: int
    """Query words of a row, and payload words of a partial row (the LSE word comes on top)."""
    uses: int
    readers: int
    """CTAs that read every query word of a row."""
    empty_rows: bool
    """Whether any subset of the rows may be empty on any rank in any use."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.words, self.uses, self.readers) < 1:
            raise ValueError(f"ranks, words, uses and readers must all be at least 1: {self}")
