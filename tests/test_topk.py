"""Exact top-k over ranks: the order of candidate keys, and the merge of the ranks' lists against a brute force.

The brute force here sorts (score, position) pairs in Python and shares nothing with `topk.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcp_decode import topk

LAST_POSITION = 2**31 - 1
SMALLEST_SUBNORMAL = 2.0**-149
# Every kind of score in descending order; -0.0 beside +0.0, which it equals.
SCORES = (
    math.inf,
    3.4028234663852886e38,
    1.0000001192092896,
    1.0,
    2.0**-126,
    2.0**-127,
    SMALLEST_SUBNORMAL,
    0.0,
    -SMALLEST_SUBNORMAL,
    -(2.0**-126),
    -1.0,
    -3.4028234663852886e38,
    -math.inf,
    math.nan,
)


@dataclass(frozen=True)
class Shards:
    """Index scores of one row, dealt to ranks: shards[rank] = [(score, position), ...]."""

    shards: tuple[tuple[tuple[float, int], ...], ...]

    def candidates(self, width: int) -> torch.Tensor:
        """int64 [D, 1, width]: what the ranks push."""
        lists = []
        for shard in self.shards:
            scores = torch.tensor([score for score, _ in shard], dtype=torch.float32)
            positions = torch.tensor([position for _, position in shard], dtype=torch.int64)
            lists.append(topk.local_candidates(scores, positions, width))
        return torch.stack(lists)[:, None]

    def best(self, width: int) -> list[list[int]]:
        """By brute force: the selected positions of each rank, ascending."""
        everything = [(score, position, rank) for rank, shard in enumerate(self.shards) for score, position in shard]
        everything.sort(key=lambda entry: (math.isnan(entry[0]), -entry[0] if entry[0] == entry[0] else 0, entry[1]))
        chosen = everything[:width]
        return [sorted(position for _, position, owner in chosen if owner == rank) for rank in range(len(self.shards))]

    def selected(self, width: int) -> list[list[int]]:
        """By the product: the same, each rank by itself from the same candidates."""
        candidates = self.candidates(width)
        result = []
        for rank in range(len(self.shards)):
            row = topk.selected_by_rank(candidates, rank)[0].tolist()
            count = sum(position >= 0 for position in row)
            assert row[count:] == [-1] * (width - count)
            result.append(row[:count])
        return result


def deal(scores: list[float], first: int, ranks: int, stride: int = 1) -> Shards:
    """Scores at positions first, first + stride, ... dealt round robin."""
    entries = [(score, first + stride * index) for index, score in enumerate(scores)]
    return Shards(tuple(tuple(entries[rank::ranks]) for rank in range(ranks)))


def words(keys: torch.Tensor) -> torch.Tensor:
    return keys.contiguous().view(torch.int32)


def test_order_of_keys_is_score_descending_then_position_ascending() -> None:
    positions = (0, 1, 2**24, 2**24 + 1, LAST_POSITION - 1, LAST_POSITION)
    ordered = [(score, position) for score in SCORES for position in positions]
    scores = torch.tensor([score for score, _ in ordered], dtype=torch.float32)
    assert scores[6 * len(positions)] > 0  # subnormals are not flushed on the way in
    keys = topk.candidate_keys(scores, torch.tensor([position for _, position in ordered]))
    assert bool((keys.diff() < 0).all())
    assert bool((keys > topk.ABSENT).all())
    assert topk.key_positions(keys).tolist() == [position for _, position in ordered]


def test_negative_zero_is_zero_and_every_nan_is_one() -> None:
    positions = torch.tensor([5, 5])
    assert topk.candidate_keys(torch.tensor([0.0, -0.0]), positions).unique().numel() == 1
    payloads = torch.tensor([0x7FC00000, -1, 0x7F800001, -0x00400000, -0x007FFFFF], dtype=torch.int32)
    keys = topk.candidate_keys(payloads.view(torch.float32), torch.full((5,), 5))
    assert keys.unique().numel() == 1
    assert int(keys[0]) < int(topk.candidate_keys(torch.tensor([-math.inf]), torch.tensor([LAST_POSITION]))[0])


@given(
    bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50),
    position=st.integers(0, LAST_POSITION),
)
@example(bits=[-1, -(2**31), 0, 0x7FFFFFFF, -0x00800000], position=LAST_POSITION)
@settings(max_examples=200, deadline=None)
def test_no_key_holds_an_armed_word(bits: list[int], position: int) -> None:
    scores = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    keys = topk.candidate_keys(scores, torch.full((len(bits),), position))
    assert bool((words(keys) != -1).all())
    assert bool((keys != topk.ABSENT).all())


def test_absent_key_holds_no_armed_word_and_a_score_of_negative_zero_would() -> None:
    assert words(torch.tensor([topk.ABSENT])).tolist() == [0, -(2**31)]
    # Negative control: the map without the + 0.0 that normalises -0.0 makes an armed high word of it.
    bits = torch.tensor([-0.0]).view(torch.int32).to(torch.int64)
    assert words((bits ^ 0x7FFFFFFF) << 32).tolist()[1] == -1


# Few distinct scores, so that most borders of a top-k are ties; positions far above 2**24 and a few of the odd scores.
score_values = st.sampled_from([0.0, -0.0, 1.0, 2.0, 2.5, -1.0, math.inf, -math.inf, math.nan])


@st.composite
def sharded(draw: st.DrawFn) -> Shards:
    ranks = draw(st.sampled_from([1, 2, 4, 8, 16]))
    positions = draw(
        st.lists(
            st.integers(0, 40) | st.integers(2**24 - 20, 2**24 + 20) | st.integers(LAST_POSITION - 20, LAST_POSITION),
            unique=True,
            max_size=60,
        )
    )
    # All on one rank, two ranks, or anywhere: empty and ragged shards are the normal case.
    owners = draw(st.sampled_from([[0], [ranks - 1], [0, ranks - 1], list(range(ranks))]))
    shards: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]
    for position in positions:
        shards[draw(st.sampled_from(owners))].append((draw(score_values), position))
    return Shards(tuple(map(tuple, shards)))


@given(shards=sharded(), width=st.integers(1, 24))
@settings(max_examples=400, deadline=None)
def test_merge_is_the_selection_by_brute_force(shards: Shards, width: int) -> None:
    selected = shards.selected(width)
    assert selected == shards.best(width)
    union = [position for own in selected for position in own]
    visible = sum(map(len, shards.shards))
    assert len(union) == len(set(union)) == min(width, visible)


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("first", [0, 2**24 - 50, LAST_POSITION - 300])
def test_all_tied_scores_select_the_lowest_positions(ranks: int, first: int) -> None:
    shards = deal([1.5] * 300, first, ranks)
    selected = shards.selected(64)
    assert sorted(position for own in selected for position in own) == list(range(first, first + 64))


def test_fewer_visible_positions_than_the_width_select_all() -> None:
    shards = deal([math.nan, -math.inf, 0.0], 7, 8)
    assert shards.selected(16) == [[7], [8], [9], [], [], [], [], []]
    nothing = deal([], 0, 4)
    assert nothing.selected(5) == [[], [], [], []]


def test_large_rows_with_ties_at_the_border() -> None:
    """2048 of 100,000 positions with 200 distinct scores, as a real row: ranks and brute force agree."""
    generator = torch.Generator().manual_seed(2)
    scores = (torch.randint(0, 200, (100_000,), generator=generator) / 8).tolist()
    shards = deal(scores, 0, 8)
    selected = shards.selected(2048)
    assert selected == shards.best(2048)
    union = sorted(position for own in selected for position in own)
    assert topk.global_topk(torch.tensor(scores), 2048).tolist() == union
    # The border is a tie that is cut: some positions of the lowest selected score are left out.
    border = min(scores[position] for position in union)
    assert 0 < sum(scores[position] == border for position in union) < scores.count(border)


def test_rows_of_a_batch_are_independent() -> None:
    rows = [deal([float(index % 5) for index in range(40)], 100, 4), deal([], 0, 4), deal([1.0] * 3, 9, 4)]
    batch = torch.cat([row.candidates(8) for row in rows], dim=1)
    for rank in range(4):
        together = topk.selected_by_rank(batch, rank)
        for index, row in enumerate(rows):
            assert torch.equal(together[index], topk.selected_by_rank(row.candidates(8), rank)[0])


def test_order_of_a_ranks_candidates_does_not_matter() -> None:
    """A list may be pushed unsorted: any permutation of it selects the same."""
    shards = deal([float(index * 7 % 11) for index in range(120)], 2**24 - 60, 4)
    candidates = shards.candidates(16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    for rank in range(4):
        assert torch.equal(
            topk.selected_by_rank(candidates, rank), topk.selected_by_rank(candidates[:, :, order], rank)
        )


def wrong_fp32_positions(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return RIGHT_KEYS(scores, positions.to(torch.float32).to(torch.int64).clamp(max=LAST_POSITION))


def wrong_position_first(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return RIGHT_KEYS(torch.zeros_like(scores), positions)


def wrong_highest_position_of_ties(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    keys = RIGHT_KEYS(scores, positions)
    return (keys & ~0xFFFFFFFF) | positions


def wrong_raw_bits(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    bits = scores.view(torch.int32).to(torch.int64)
    return (bits << 32) | (LAST_POSITION - positions)


RIGHT_KEYS = topk.candidate_keys


@pytest.mark.parametrize(
    "wrong", [wrong_fp32_positions, wrong_position_first, wrong_highest_position_of_ties, wrong_raw_bits]
)
def test_wrong_keys_are_found(wrong: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each wrong key gives another selection than the brute force, so the tests above can fail."""
    scores = [-float(index * 13 % 17) for index in range(200)]
    shards = deal(scores, 2**24 - 100, 8)
    assert shards.selected(20) == shards.best(20)
    monkeypatch.setattr(topk, "candidate_keys", wrong)
    assert shards.selected(20) != shards.best(20)


def test_lists_shorter_than_the_local_topk_are_found() -> None:
    """Negative control: one rank may hold the whole selection, so half the width a rank is not enough."""
    shards = Shards((tuple((5.0, position) for position in range(12)), ((1.0, 100), (1.0, 101))))
    candidates = shards.candidates(12)
    assert topk.selected_by_rank(candidates, 0)[0].tolist() == shards.best(12)[0]
    candidates[0, 0, 6:] = topk.ABSENT
    assert topk.selected_by_rank(candidates, 0)[0].tolist() != shards.best(12)[0]


def test_swapped_slots_of_two_ranks_are_found() -> None:
    """Negative control: a rank that takes another's list for its own selects what it does not store."""
    shards = Shards((tuple((5.0, position) for position in range(12)), ((1.0, 100), (1.0, 101))))
    swapped = shards.candidates(14)[[1, 0]]
    assert topk.selected_by_rank(swapped, 0)[0].tolist()[:2] == [100, 101]
    assert shards.best(14)[0] == list(range(12))


def test_compaction_keeps_the_prefix_and_counts_it() -> None:
    positions = torch.tensor([[3, 9, 2**24 + 1, -1], [-1, -1, -1, -1], [1, 2, 3, 4]])
    flat = torch.tensor([[70, 5, 2**31 - 2, 99], [7, 7, 7, 7], [4, 3, 2, 0]])
    rows, valid = topk.compact_rows(positions, flat)
    assert (rows.dtype, valid.dtype) == (torch.int32, torch.int32)
    # Flat rows keep the order of the positions, not their own; what stands at absent places never shows.
    assert rows.tolist() == [[70, 5, 2**31 - 2, -1], [-1] * 4, [4, 3, 2, 0]]
    assert valid.tolist() == [3, 0, 4]


@pytest.mark.parametrize("width", [3, 8, 20])
def test_static_shapes_select_what_single_rows_select(width: int) -> None:
    """Both borders: more positions than the width, fewer, and rows that see only a part of them."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(0, 3, (2, 4, 12), generator=generator).to(torch.float32)
    positions = torch.arange(12) * 4 + 2**24
    visible = positions <= positions[torch.tensor([0, 5, 11, 2])][:, None]
    visible[0] = False
    keys, places = topk.batch_candidates(scores, positions, visible, width)
    for rank in range(2):
        for row in range(4):
            seen = visible[row]
            alone = topk.local_candidates(scores[rank, row, seen], positions[seen], width)
            assert keys[rank, row].sort().values.tolist() == alone.sort().values.tolist()
            present = keys[rank, row] != topk.ABSENT
            found = topk.key_positions(keys[rank, row][present])
            assert found.tolist() == sorted(found.tolist())
            assert torch.equal(positions[places[rank, row][present]], found)


def test_the_border_is_the_lowest_selected_key() -> None:
    shards = deal([float(index % 5) for index in range(40)], 2**24, 4)
    candidates = shards.candidates(8)
    border = topk.selection_border(candidates.permute(1, 0, 2).reshape(1, -1), 8)
    for rank in range(4):
        own = candidates[rank][candidates[rank] >= border]
        assert sorted(topk.key_positions(own).tolist()) == shards.best(8)[rank]
    nothing = torch.full((1, 32), topk.ABSENT, dtype=torch.int64)
    assert not bool((nothing >= topk.selection_border(nothing, 8)).any())
