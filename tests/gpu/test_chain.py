"""The fused chain on a GPU: bit by bit what the three stages push and merge."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from chain_group import DECODE, ChainGroup, PushedWords  # noqa: E402
from poison import poison_shared_memory  # noqa: E402
from stage_group import GroupInputs, StageGroup, make_group_inputs  # noqa: E402

from dcp_decode.geometry import Geometry  # noqa: E402
from dcp_decode.mailbox import Stage  # noqa: E402
from dcp_decode.waits import read_record  # noqa: E402

pytestmark = pytest.mark.gpu

COUNTS = [256, 0, 1, 257, 64, 400, 2048]
stages = partial(StageGroup, **DECODE)  # of the same family as a chain by default


def ragged_inputs(geometry: Geometry, batch: int, seed: int, empty_row: bool = True) -> GroupInputs:
    """Every rank sees another count in a row, some 0; the last row is empty on all ranks."""
    counts = [[COUNTS[(rank + 2 * row + seed) % len(COUNTS)] for row in range(batch)] for rank in range(geometry.dcp)]
    if empty_row and batch > 1:
        for many in counts:
            many[-1] = 0
    return make_group_inputs(geometry, counts, seed)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


decodes = pytest.mark.parametrize(
    "decode",
    [{"exchange": "partials", "chunk": 64}, {"exchange": "probabilities", "chunk": 64}, DECODE],
    ids=["partials", "probabilities", "probabilities_128"],
)


@decodes
@pytest.mark.parametrize(
    ("heads", "dcp", "batch", "choices"),
    [
        (96, 8, 5, {}),
        (96, 8, 1, {}),
        (96, 8, 4, {"padded_heads": 128, "capacity": 9}),
        (96, 8, 2, {"generations": 3}),
        (128, 8, 3, {}),
        (64, 4, 5, {}),
        (96, 1, 2, {}),
        (96, 2, 3, {}),
    ],
)
def test_one_rank_pushes_and_merges_the_bits_of_the_stages(
    heads: int, dcp: int, batch: int, choices: dict, decode: dict
) -> None:
    geometry = Geometry(heads=heads, dcp=dcp, **({"padded_heads": heads, "capacity": batch} | choices))
    staged = StageGroup(geometry, batch, **decode)
    for use in range(2):
        inputs = ragged_inputs(geometry, batch, seed=use)
        pushed = PushedWords(staged, inputs)
        for rank in sorted({0, dcp // 2, dcp - 1}):
            group = ChainGroup(geometry, batch, **decode)
            for mailbox in group.mailboxes:
                for stage in (Stage.QUERY, Stage.SPARSE, Stage.MERGE, Stage.TOPK):
                    mailbox.use_counter(stage).add_(use)
            pushed.put(group.mailboxes[rank], [source for source in range(dcp) if source != rank])
            group.merged.view(torch.int16).fill_(-1)
            torch.cuda.synchronize()
            poison_shared_memory(group.streams[rank].cuda_stream)
            group.launch(rank, inputs)
            torch.cuda.synchronize()
            assert read_record(group.mailboxes[rank]) is None
            assert_same_bits(group.merged[rank], pushed.merged[rank])
            # What it pushed to its peers is what the stages push, and nothing else; its own mailbox is as new.
            expected = StageGroup(geometry, batch)
            for mailbox in expected.mailboxes:
                if mailbox.rank != rank:
                    pushed.put(mailbox, [rank])
                    expected.layout.credit.words(mailbox.memory.local)[pushed.generation, rank] = use
            start = group.layout.topk.offset
            for found, wanted in zip(group.mailboxes, expected.mailboxes, strict=True):
                assert torch.equal(found.memory.local[start:], wanted.memory.local[start:]), f"mailbox {found.rank}"
            counters = [int(group.mailboxes[rank].use_counter(stage)) for stage in Stage]
            assert counters == [use + 1, use + 1, use + 1, 0, use]


# Small enough that all ranks' clusters are resident at once: (heads, dcp, batch), at most 24 clusters.
SIDE_BY_SIDE = [(32, 8, 1), (48, 8, 1), (64, 4, 1), (64, 2, 3), (96, 2, 2), (96, 1, 5)]


@decodes
@pytest.mark.parametrize(("heads", "dcp", "batch"), SIDE_BY_SIDE)
def test_ranks_side_by_side_give_the_bits_of_the_stages(heads: int, dcp: int, batch: int, decode: dict) -> None:
    geometry = Geometry(heads=heads, dcp=dcp, padded_heads=heads, capacity=batch)
    staged, group = StageGroup(geometry, batch, **decode), ChainGroup(geometry, batch, **decode)
    for use in range(4):
        inputs = ragged_inputs(geometry, batch, seed=use)
        assert_same_bits(group.step_fused(inputs), staged.step(inputs))
    group.check_as_new(uses=4)


def test_a_hundred_uses_fused_and_staged_of_other_batch_sizes_in_any_order() -> None:
    geometry = Geometry(heads=64, dcp=4, padded_heads=64, capacity=5)
    groups = [ChainGroup(geometry, 1, poison=False), *(stages(geometry, batch, poison=False) for batch in (2, 5))]
    for other in groups[1:]:
        other.mailboxes = groups[0].mailboxes
    reference = {group.batch: stages(geometry, group.batch, poison=False) for group in groups}
    inputs = {group.batch: ragged_inputs(geometry, group.batch, seed=group.batch) for group in groups}
    expected = {batch: reference[batch].step(inputs[batch]) for batch in reference}
    for use in range(100):
        group = groups[0] if use % 3 else groups[1 + use % 2]
        step = group.step_fused if isinstance(group, ChainGroup) else group.step
        assert_same_bits(step(inputs[group.batch]), expected[group.batch])
    groups[0].check_as_new(uses=100)


def test_graph_replays_and_eager_calls_in_any_order_give_the_eager_bits() -> None:
    geometry = Geometry(heads=64, dcp=4, padded_heads=64, capacity=1)
    inputs = ragged_inputs(geometry, 1, seed=4)
    group = ChainGroup(geometry, 1, poison=False)
    expected = stages(geometry, 1).step(inputs)
    graphs = []
    assert_same_bits(group.step_fused(inputs), expected)
    uses = 1
    for rank, stream in enumerate(group.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):  # an odd number of uses a replay flips the generation
                group.launch(rank, inputs)
        graphs.append(graph)
    for turn in range(100):
        group.merged.view(torch.int16).fill_(-1)
        if turn % 7 == 3:
            assert_same_bits(group.step_fused(inputs), expected)
            uses += 1
            continue
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, group.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        uses += 3
        assert_same_bits(group.merged, expected)
    group.check_as_new(uses)


def test_nans_poison_exactly_what_they_poison_in_the_stages() -> None:
    geometry = Geometry(heads=64, dcp=4, padded_heads=64, capacity=1)
    inputs = ragged_inputs(geometry, 1, seed=6)
    inputs.query[2, 0, 3, 17] = float("nan")
    inputs.query[1, 0, 0, 0] = -float("nan")
    staged = stages(geometry, 1).step(inputs)
    assert 0 < int(torch.isnan(staged).sum()) < staged.numel()
    assert_same_bits(ChainGroup(geometry, 1).step_fused(inputs), staged)
    inputs.cache[3, inputs.rows[3, 0, 0], 100] = 0xFF
    staged = stages(geometry, 1).step(inputs)
    assert bool(torch.isnan(staged).all())
    assert_same_bits(ChainGroup(geometry, 1).step_fused(inputs), staged)


def test_a_missing_rank_is_named_and_nothing_is_merged() -> None:
    geometry = Geometry(capacity=5)
    group = ChainGroup(geometry, 5, poison=False)
    inputs = ragged_inputs(geometry, 5, seed=6)
    pushed = PushedWords(stages(geometry, 5, poison=False), inputs)
    pushed.put(group.mailboxes[0], [1, 2, 4, 5, 6, 7])
    group.merged.view(torch.int16).fill_(-1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record(group.streams[0])
    group.launch(0, inputs, deadline=20_000_000)
    group.launch(0, inputs, deadline=20_000_000)  # finds the abort word, and returns at once
    end.record(group.streams[0])
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 60
    wait = read_record(group.mailboxes[0])
    assert wait is not None
    assert (wait.waiting_rank, wait.source_rank, wait.use) == (0, 3, 0)
    assert bool((group.merged[0].view(torch.int16) == -1).all())


@pytest.mark.parametrize(("section", "stage"), [("lse_log2", Stage.MERGE), ("credit", Stage.SPARSE)])
def test_a_missing_word_is_named(section: str, stage: Stage) -> None:
    geometry = Geometry(capacity=5)
    group = ChainGroup(geometry, 5, poison=False)
    inputs = make_group_inputs(geometry, [[16] * 5 for _ in range(8)], seed=7)
    pushed = PushedWords(stages(geometry, 5, poison=False), inputs)
    pushed.put(group.mailboxes[2], [0, 1, 3, 4, 5, 6, 7])
    words = getattr(group.layout, section).words(group.mailboxes[2].memory.local)
    words[0, 6] = -1  # all of source 6 in generation 0: its LSE words, or its one credit word
    torch.cuda.synchronize()
    group.launch(2, inputs, deadline=20_000_000)
    torch.cuda.synchronize()
    wait = read_record(group.mailboxes[2])
    assert wait is not None
    assert (wait.stage, wait.source_rank, wait.word) == (stage.name, 6, 0)
    assert (wait.row == -1) == (section == "credit"), "a credit word belongs to no row"
