"""The protocol of the harness and its variants: what each one changes, and what the checker is expected to say.

A variant that is expected to be safe although it drops a rule says in ``why`` what the rule is for then.
"""

from dataclasses import dataclass, replace

from dcp_decode.protocol.rules import (
    Counter,
    Credit,
    EmptyRow,
    Launches,
    MergeWait,
    PollFence,
    PushFence,
    QueryCheck,
    Rearm,
    Rules,
    SecondRead,
    Size,
)
from dcp_decode.protocol.state import DEADLOCK, LEFT_OVER, LOST_PUSH, TORN_ROW


@dataclass(frozen=True)
class Variant:
    """A protocol under test. ``violates`` names the property that it is expected to violate, or nothing."""

    name: str
    rules: Rules
    why: str
    violates: str = ""
    largest: Size | None = None
    """The size a safe variant is proved at, where the usual ones take too long."""

    @property
    def expected_safe(self) -> bool:
        return not self.violates


CONTRACT = Variant("contract", Rules(), "the protocol of the harness")

_ONE_GENERATION = Rules(
    generations=1,
    poll_fence=PollFence.BEFORE_BARRIER,
    value_push_fence=True,
    value_push_after_rearm=True,
    empty_push_after_polls=True,
)

_GENERATIONS = (
    Variant(
        "one_generation",
        Rules(generations=1),
        "the next query is pushed by a rank that has this rank's value, and that value says nothing of the re-arm",
        LOST_PUSH,
    ),
    Variant(
        "one_generation_pushes_after_rearm",
        Rules(generations=1, value_push_after_rearm=True, empty_push_after_polls=True),
        "program order and barriers inside a rank order nothing for another rank without a fence",
        LOST_PUSH,
    ),
    Variant(
        "one_generation_fenced",
        _ONE_GENERATION,
        "one generation is enough if stage 2 fences twice between the arrival of a query and the push of its values, "
        "and if empty rows wait for their query words before they push. The second generation keeps both off the "
        "critical path",
    ),
    Variant(
        "one_generation_without_push_fence_in_stage_2",
        replace(_ONE_GENERATION, value_push_fence=False),
        "the value does not carry the re-arm of the query words to their owner",
        LOST_PUSH,
    ),
    Variant(
        "one_generation_without_early_poll_fence",
        replace(_ONE_GENERATION, poll_fence=PollFence.AT_EXIT),
        "the value is pushed by threads that have not acquired the owner's re-arm of its value slot",
        LOST_PUSH,
    ),
    Variant(
        "one_generation_push_unordered_with_rearm",
        replace(_ONE_GENERATION, value_push_after_rearm=False),
        "the fence must lie between the re-arm and the push",
        LOST_PUSH,
    ),
    Variant(
        "one_generation_without_merge_fence",
        replace(_ONE_GENERATION, merge_poll_fence=False),
        "with one generation the fence after the polls of stage 3 is the one that acquires the re-arms",
        LOST_PUSH,
    ),
    Variant(
        "one_generation_empty_rows_push_early",
        replace(_ONE_GENERATION, empty_push_after_polls=False),
        "EMPTY_LSE lets the owner go on before this rank has consumed the owner's query words",
        LOST_PUSH,
    ),
    Variant("three_generations", Rules(generations=3), "more generations than needed"),
    Variant(
        "three_generations_without_fences",
        Rules(generations=3, push_fence=PushFence.NONE, poll_fence=PollFence.NONE, merge_poll_fence=False),
        "more generations do not replace the fences: however old the re-arm is, nothing orders it",
        LOST_PUSH,
    ),
)

_FENCES = (
    Variant(
        "no_fence_in_stage_1",
        Rules(push_fence=PushFence.NONE),
        "the query does not carry this rank's re-arms to the ranks that will push into these words again",
        LOST_PUSH,
    ),
    Variant(
        "stage_1_fence_before_wait",
        Rules(push_fence=PushFence.BEFORE_WAIT),
        "a fence before the dependency wait releases nothing of what the earlier stages did",
        LOST_PUSH,
    ),
    Variant(
        "stage_1_fence_in_one_thread",
        Rules(push_fence=PushFence.ONE_THREAD),
        "a fence releases through the later stores of its own thread, not through those of others",
        LOST_PUSH,
    ),
    Variant(
        "stage_1_fence_once_per_destination",
        Rules(push_fence=PushFence.ONE_PER_DESTINATION),
        "one fenced push to each rank carries enough, as long as the reader of that very word executes its fence. All "
        "pushing threads fence because then no reader has to know which word carries it",
    ),
    Variant(
        "no_fence_after_polls_in_stage_2",
        Rules(poll_fence=PollFence.NONE),
        "what the queries carry is not acquired",
        LOST_PUSH,
    ),
    Variant(
        "stage_2_fence_once_per_source",
        Rules(poll_fence=PollFence.ONE_PER_ROW),
        "one acquired query word of each rank is enough where every pushing thread has fenced. All polling threads "
        "fence because then stage 1 may fence where it likes",
    ),
    Variant(
        "one_fence_each_way",
        Rules(push_fence=PushFence.ONE_PER_DESTINATION, poll_fence=PollFence.ONE_PER_ROW),
        "the least that is safe: for each pair of ranks one released and acquired query word, and it must be the same",
    ),
    Variant(
        "no_fence_after_polls_in_stage_3",
        Rules(merge_poll_fence=False),
        "with two generations the values carry nothing (stage 2 pushes them without a fence), so there is nothing to "
        "acquire. The fence is needed with one generation, and where stage 2 releases instead of stage 1",
    ),
    Variant(
        "fences_around_the_values_instead",
        Rules(push_fence=PushFence.NONE, poll_fence=PollFence.NONE, value_push_fence=True),
        "the release can ride on the values instead of the queries: a fence before the pushes of stage 2, and the one "
        "after the polls of stage 3. Safe, but on the critical path",
    ),
)

_READERS = (
    Variant(
        "rearm_before_all_have_read",
        Rules(rearm=Rearm.ONE_AFTER_OWN),
        "a slower reader sees the word armed again and waits for a value that has been and gone",
        DEADLOCK,
    ),
    Variant(
        "every_reader_rearms_after_its_own_read",
        Rules(rearm=Rearm.EVERY_AFTER_OWN),
        "the same, from every reader",
        DEADLOCK,
    ),
    Variant(
        "every_reader_rearms_after_all_have_read",
        Rules(rearm=Rearm.EVERY_AFTER_ALL),
        "re-arming twice in one use is harmless: both stores are ordered before the next push. One reader is enough, "
        "and saves the stores",
        largest=Size(ranks=2, words=1, uses=4, readers=2, empty_rows=True),
    ),
    Variant("no_rearm", Rules(rearm=Rearm.NEVER), "the value stays behind for the use after next", LEFT_OVER),
    Variant(
        "empty_rows_leave_their_query_words",
        Rules(empty_row=EmptyRow.SKIP),
        "the query that nobody consumed stays behind for the use after next",
        LEFT_OVER,
    ),
    Variant(
        "empty_rows_rearm_without_waiting",
        Rules(empty_row=EmptyRow.REARM_BLINDLY),
        "a query that comes after its re-arm stays behind",
        LEFT_OVER,
    ),
    Variant(
        "empty_rows_push_after_polls",
        Rules(empty_push_after_polls=True),
        "stricter than needed: with two generations an empty row may push EMPTY_LSE before its query words are there",
    ),
    Variant(
        "only_first_query_word_polled",
        Rules(query_check=QueryCheck.FIRST_WORD),
        "the words of a row arrive in any order",
        TORN_ROW,
    ),
    Variant(
        "query_word_read_again_after_rearm",
        Rules(second_read=SecondRead.UNORDERED),
        "the word may be armed again when it is read a second time",
        TORN_ROW,
    ),
    Variant(
        "query_word_copied_by_another_proxy",
        Rules(second_read=SecondRead.ASYNC_PROXY),
        "a load through the async proxy is not ordered with the poll and may return the armed word",
        TORN_ROW,
    ),
    Variant(
        "payload_awaited_before_lse",
        Rules(merge_wait=MergeWait.PAYLOAD_THEN_LSE),
        "the payload of an empty row never comes",
        DEADLOCK,
    ),
    Variant(
        "only_lse_polled",
        Rules(merge_wait=MergeWait.LSE_ONLY),
        "the LSE word may overtake the payload words",
        TORN_ROW,
    ),
)

_NUMBERS = (
    Variant(
        "number_incremented_by_first_cta_at_start",
        Rules(counter=Counter.FIRST_CTA_STARTS),
        "a CTA that starts later reads the number of the next use",
        DEADLOCK,
    ),
    Variant(
        "number_incremented_by_first_cta_at_end",
        Rules(counter=Counter.FIRST_CTA_ENDS),
        "a CTA that starts later reads the number of the next use",
        DEADLOCK,
    ),
    Variant(
        "number_incremented_by_last_cta_at_end",
        Rules(counter=Counter.LAST_CTA_ENDS),
        "a stage may increment its own number once all its CTAs are done, but finding the last CTA takes an atomic "
        "count that the next stage has for free",
    ),
    Variant(
        "generation_baked_at_capture",
        Rules(counter=Counter.BAKED, baked=(0, 0, 1, 0)),
        "a graph of one use replayed twice takes one generation twice in a row (then an eager use takes the other)",
        LOST_PUSH,
    ),
    Variant(
        "no_dependency_wait_in_stage_1",
        Rules(missing_wait=1),
        "stage 2 then waits for a stage 1 that says nothing of the merge before it, and reads its use number too early",
        DEADLOCK,
    ),
    Variant(
        "no_dependency_wait_in_stage_2",
        Rules(missing_wait=2),
        "stage 3 then waits for a stage 2 that says nothing of stage 1, and reads its use number too early",
        DEADLOCK,
    ),
    Variant(
        "no_dependency_wait_in_stage_3",
        Rules(missing_wait=3),
        "stage 3 can end, and the next use begin, while stage 2 still owes its re-arms",
        LOST_PUSH,
    ),
)

FUSED = Variant(
    "fused",
    Rules(launches=Launches.FUSED, credit=Credit.FENCED),
    "the fused chain of the harness: one kernel a use; no data thread fences, a credit word carries the order",
)

_FUSED = (
    FUSED,
    Variant(
        "fused_and_staged_uses_in_turn",
        Rules(launches=Launches.IN_TURN, credit=Credit.FENCED),
        "each use has one release and one acquire for each pair of ranks, whichever words carry them",
    ),
    Variant(
        "fused_with_fenced_queries",
        Rules(launches=Launches.FUSED),
        "the fences of the three stages serve a fused use as well, on its critical path",
    ),
    Variant(
        "credit_in_stage_2",
        Rules(credit=Credit.FENCED),
        "with three kernels too, one fenced warp in stage 2 can stand for all fences of stages 1 and 2",
    ),
    Variant(
        "fused_credit_without_push_fence",
        Rules(launches=Launches.FUSED, credit=Credit.NO_PUSH_FENCE),
        "the credit does not carry this rank's re-arms",
        LOST_PUSH,
    ),
    Variant(
        "fused_credit_without_poll_fence",
        Rules(launches=Launches.FUSED, credit=Credit.NO_POLL_FENCE),
        "what the credit carries is not acquired",
        LOST_PUSH,
    ),
    Variant(
        "fused_in_turn_without_push_fence",
        Rules(launches=Launches.IN_TURN, credit=Credit.NO_PUSH_FENCE),
        "the fences of the staged uses do not stand for those of the fused ones between them",
        LOST_PUSH,
    ),
    Variant(
        "fused_with_one_generation",
        Rules(generations=1, launches=Launches.FUSED, credit=Credit.FENCED),
        "a peer that has this rank's query and values may push its next query before this rank has re-armed",
        LOST_PUSH,
    ),
    Variant(
        "fused_number_incremented_by_first_cta",
        Rules(launches=Launches.FUSED, credit=Credit.FENCED, fused_counter=Counter.FIRST_CTA_STARTS),
        "a CTA that reads later takes the next use's number",
        DEADLOCK,
    ),
    Variant(
        "fused_waits_before_pushes",
        Rules(launches=Launches.FUSED, credit=Credit.FENCED, waits_before_pushes=True),
        "every rank waits for queries that the others push only after their own wait",
        DEADLOCK,
    ),
)

VARIANTS = (CONTRACT, *_GENERATIONS, *_FENCES, *_READERS, *_NUMBERS, *_FUSED)

FULL_SIZES = (
    Size(ranks=2, words=2, uses=4, readers=2, empty_rows=False),
    Size(ranks=2, words=2, uses=4, readers=2, empty_rows=True),
    Size(ranks=3, words=1, uses=4, readers=2, empty_rows=False),
    Size(ranks=3, words=1, uses=4, readers=2, empty_rows=True),
)
"""Where a safe variant is proved."""

CONTRACT_SIZES = (
    Size(ranks=2, words=2, uses=12, readers=4, empty_rows=True),
    Size(ranks=3, words=2, uses=4, readers=2, empty_rows=False),
    Size(ranks=8, words=1, uses=4, readers=2, empty_rows=False),
)
"""Where the protocols of the harness are proved too."""

SMALL_SIZES = (
    Size(ranks=2, words=1, uses=4, readers=2, empty_rows=True),
    Size(ranks=3, words=1, uses=3, readers=1, empty_rows=False),
)
"""The same within seconds, for the test suite."""

COUNTEREXAMPLE_SIZES = tuple(
    Size(ranks, words, uses, readers, empty_rows)
    for ranks, words, uses, readers in (
        (1, 1, 1, 1),
        (1, 1, 1, 2),
        (1, 1, 2, 1),
        (2, 1, 1, 1),
        (2, 1, 1, 2),
        (2, 2, 1, 1),
        (2, 1, 2, 1),
        (2, 1, 3, 1),
        (2, 1, 4, 1),
    )
    for empty_rows in (False, True)
)
"""Where an unsafe variant is tried, smallest first: the first size that shows a violation gives the shortest trace."""


def variant(name: str) -> Variant:
    """The variant of this name."""
    for candidate in VARIANTS:
        if candidate.name == name:
            return candidate
    raise KeyError(name)
