"""The checker itself: it finds what is wrong, and its reductions lose nothing."""

import random

import pytest

from dcp_decode.protocol.model import Model
from dcp_decode.protocol.rules import Counter, Rules, Size
from dcp_decode.protocol.search import TooManyStatesError, enabled_steps, replay, search
from dcp_decode.protocol.state import State
from dcp_decode.protocol.variants import CONTRACT, VARIANTS, Variant, variant

ONE_RANK = Size(ranks=1, words=1, uses=2, readers=2, empty_rows=True)
TWO_RANKS = Size(ranks=2, words=1, uses=1, readers=1, empty_rows=False)


@pytest.mark.parametrize("each", VARIANTS, ids=lambda each: each.name)
def test_reduction_changes_no_verdict_and_no_end(each: Variant):
    full = search(Model(each.rules, ONE_RANK, forget=False), reduce=False, keep_ends=True)
    for forget in (False, True):
        model = Model(each.rules, ONE_RANK, forget=forget)
        reduced = search(model, keep_ends=True)
        assert reduced.safe == full.safe
        assert reduced.states <= full.states
        if full.safe:
            assert reduced.ends == search(model, reduce=False, keep_ends=True).ends


def test_reduction_changes_no_end_between_two_ranks():
    model = Model(CONTRACT.rules, TWO_RANKS)
    full = search(model, reduce=False, keep_ends=True)
    reduced = search(model, keep_ends=True)
    assert full.safe
    assert reduced.safe
    assert full.states > 80_000
    assert reduced.states < 100
    assert reduced.ends == full.ends


@pytest.mark.parametrize(
    "name", ["only_lse_polled", "query_word_copied_by_another_proxy", "number_incremented_by_first_cta_at_end"]
)
def test_search_without_reduction_finds_the_same_violation_between_two_ranks(name: str):
    each = variant(name)
    assert search(Model(each.rules, TWO_RANKS, forget=False), reduce=False).violated == each.violates


@pytest.mark.parametrize(
    "name",
    [
        "contract",
        "one_generation_fenced",
        "no_fence_after_polls_in_stage_3",
        "one_fence_each_way",
        "fused_and_staged_uses_in_turn",
        "fences_around_the_values_instead",
    ],
)
def test_random_runs_of_a_safe_protocol_end_well(name: str):
    """Runs that no reduction has chosen, at a size that no search without one can cover."""
    generator = random.Random(20240229)
    model = Model(variant(name).rules, Size(ranks=2, words=2, uses=4, readers=2, empty_rows=True), forget=False)
    for _ in range(10):
        assert _random_run(model, generator) == ""


def test_random_runs_find_what_the_search_finds():
    """A negative control of the random runs: one generation goes wrong in some of them."""
    generator = random.Random(20240229)
    model = Model(variant("one_generation").rules, Size(2, 1, 4, 1, True), forget=False)
    assert "no lost push" in {_random_run(model, generator) for _ in range(30)}


def _random_run(model: Model, generator: random.Random) -> str:
    state = model.initial()
    while steps := enabled_steps(model, state):
        outcome = generator.choice(model.outcomes(state, generator.choice(steps)))
        if outcome.violated:
            return outcome.violated
        state = outcome.state
    return model.judge_end(state)[1]


def test_a_wrong_assertion_is_found():
    model = Model(CONTRACT.rules, ONE_RANK)

    def never_ends(state: State) -> bool:
        return state.done != model.all_done

    verdict = search(model, assertion=never_ends)
    assert verdict.violated == "assertion"
    assert len(verdict.choices) == model.table.count
    played = replay(model, verdict.choices)
    assert played is not None
    assert played[1] == ""


def test_a_race_is_found_without_reduction():
    """That two steps of different threads come in one order only is wrong, and seen to be wrong."""
    model = Model(CONTRACT.rules, TWO_RANKS)
    first, second = (
        1 << next(n for n, step in enumerate(model.steps) if step.rank == rank and step.stage == 1) for rank in (0, 1)
    )

    def rank_1_is_last(state: State) -> bool:
        return bool(state.done & first) or not state.done & second

    assert search(model, reduce=False, assertion=rank_1_is_last).violated == "assertion"


def test_a_search_that_is_too_large_proves_nothing():
    with pytest.raises(TooManyStatesError):
        search(Model(CONTRACT.rules, TWO_RANKS), reduce=False, limit=1000)


def test_replay_refuses_what_cannot_happen():
    model = Model(CONTRACT.rules, TWO_RANKS)
    last = model.table.count - 1
    assert replay(model, ((last, 0),)) is None
    assert replay(model, ((0, 5),)) is None


def test_rules_and_sizes_are_checked():
    with pytest.raises(ValueError, match="generations"):
        Rules(generations=0)
    with pytest.raises(ValueError, match="missing_wait"):
        Rules(missing_wait=4)
    with pytest.raises(ValueError, match="baked"):
        Rules(counter=Counter.BAKED)
    with pytest.raises(ValueError, match="at least 1"):
        Size(ranks=0, words=1, uses=1, readers=1, empty_rows=False)
