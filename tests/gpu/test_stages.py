"""The chain of three stages on a GPU: all ranks of a group in loopback, both routes, against oracle and twin."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from stage_group import GroupInputs, StageGroup, make_group_inputs  # noqa: E402

from dcp_decode import numerics  # noqa: E402
from dcp_decode.geometry import Geometry  # noqa: E402
from dcp_decode.mailbox import Stage  # noqa: E402
from dcp_decode.needle import STRAY_BYTE, build_needle, check_needle  # noqa: E402
from dcp_decode.waits import read_record  # noqa: E402

pytestmark = pytest.mark.gpu

RAGGED = [256, 0, 1, 257, 64]


def ragged_counts(dcp: int, batch: int) -> list[list[int]]:
    """Every rank sees another count in a row, some 0; the last row is empty on all ranks."""
    counts = [[RAGGED[(rank + 2 * row) % len(RAGGED)] for row in range(batch)] for rank in range(dcp)]
    for many in counts:
        many[-1] = 0
    return counts


@pytest.mark.parametrize("push", [True, False], ids=["push", "local"])
@pytest.mark.parametrize(
    ("heads", "dcp", "batch", "choices"),
    [
        (96, 8, 5, {}),
        (96, 8, 5, {"padded_heads": 128, "capacity": 9}),
        (96, 8, 5, {"generations": 3}),
        (128, 8, 3, {}),
        (64, 4, 2, {}),
        (96, 1, 2, {}),
        (32, 2, 40, {}),
        (64, 16, 2, {}),
        (96, 8, 40, {}),
    ],
)
def test_merged_rows_lie_within_their_bounds(push: bool, heads: int, dcp: int, batch: int, choices: dict) -> None:
    extents = {"padded_heads": heads, "capacity": batch} | choices
    geometry = Geometry(heads=heads, dcp=dcp, **extents)
    group = StageGroup(geometry, batch, push)
    for use in range(3):
        inputs = make_group_inputs(geometry, ragged_counts(dcp, batch), seed=use)
        merged = group.step(inputs)
        assert bool((merged[:, -1] == 0).all()), "a row that is empty on all ranks must merge to zeros"
        for verdict in group.verdict(merged, inputs):
            verdict.require(f"heads {heads}, dcp {dcp}, batch {batch}, use {use}")
    group.check_as_new(uses=3)


def test_routes_push_the_same_payload_bits_and_merge_within_one_ulp() -> None:
    geometry = Geometry(capacity=5)
    inputs = make_group_inputs(geometry, ragged_counts(8, 5), seed=3)
    payloads, merged = [], []
    for push in (True, False):
        group = StageGroup(geometry, 5, push)
        group.push_queries(inputs)
        group.decode(inputs)
        torch.cuda.synchronize()
        payloads.append([group.layout.payload.words(mailbox.memory.local).clone() for mailbox in group.mailboxes])
        torch.cuda.synchronize()  # copied, before the merge on another stream re-arms them
        group.merge()
        torch.cuda.synchronize()
        merged.append(group.merged.clone())
    for pushed, local in zip(*payloads, strict=True):
        assert torch.equal(pushed, local)
    bits = [rows.view(torch.int16).to(torch.int32) for rows in merged]
    # BF16 bits of one sign count units in the last place; the routes never differ in sign here.
    assert int((bits[0] - bits[1]).abs().max()) <= 1


@pytest.mark.parametrize("push", [True, False], ids=["push", "local"])
def test_graph_replays_and_eager_calls_in_any_order_give_the_eager_bits(push: bool) -> None:
    geometry = Geometry(capacity=5)
    inputs = make_group_inputs(geometry, ragged_counts(8, 5), seed=4)
    group = StageGroup(geometry, 5, push, poison=False)
    expected = group.step(inputs)
    uses = 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.stream):
        for _ in range(3):  # an odd number of uses a replay flips the generation
            group.enqueue(inputs)
    for turn in range(200):
        group.merged.view(torch.int16).fill_(-1)
        if turn % 7 == 3:
            assert torch.equal(group.step(inputs).view(torch.int16), expected.view(torch.int16))
            uses += 1
            continue
        torch.cuda.synchronize()
        with torch.cuda.stream(group.stream):
            graph.replay()
        torch.cuda.synchronize()
        uses += 3
        assert torch.equal(group.merged.view(torch.int16), expected.view(torch.int16)), f"turn {turn}"
    group.check_as_new(uses)


@pytest.mark.parametrize("push", [True, False], ids=["push", "local"])
def test_every_key_is_counted_once(push: bool) -> None:
    geometry = Geometry(capacity=2)
    needle = build_needle(geometry.topk, 1, geometry)
    cache = torch.full((geometry.dcp, 4096, 576), STRAY_BYTE, dtype=torch.uint8, device="cuda")
    cache[:, : geometry.topk] = needle.key_bytes.cuda()
    rows = torch.full((geometry.dcp, 2, geometry.topk), -1, dtype=torch.int32, device="cuda")
    valid = torch.zeros(geometry.dcp, 2, dtype=torch.int32, device="cuda")
    for rank in range(geometry.dcp):
        own = torch.arange(rank, geometry.topk, geometry.dcp, dtype=torch.int32, device="cuda")
        rows[rank, 0, : len(own)] = own
        valid[rank, 0] = len(own)
    rows[-1, 1] = torch.arange(geometry.topk, dtype=torch.int32, device="cuda")
    valid[-1, 1] = geometry.topk
    query = torch.zeros(geometry.dcp, 2, geometry.owner_heads, 576, dtype=torch.bfloat16, device="cuda")
    merged = StageGroup(geometry, 2, push).step(GroupInputs(query, cache, rows, valid))
    check_needle(needle, merged)


def test_queries_are_quantized_with_nans_and_extremes_selected() -> None:
    geometry = Geometry(capacity=4, q_scale=0.37)
    group = StageGroup(geometry, 2)
    bits = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    query = torch.randn(8, 2, 12, 576, device="cuda").to(torch.bfloat16)
    flat = query.view(-1)
    flat[:65536] = bits
    group.push_queries(GroupInputs(query, *[torch.empty(0)] * 3))
    torch.cuda.synchronize()
    expected = numerics.quantize_e4m3(query, geometry.q_scale).transpose(0, 1).reshape(2, 96, 576)
    assert not bool((expected == 0xFF).any())
    for mailbox in group.mailboxes:
        section = group.layout.query.view(mailbox.memory.local)
        assert torch.equal(section[0, :2], expected)
        assert bool((section[0, 2:] == 0xFF).all()), "rows past the batch were written"
        assert bool((section[1] == 0xFF).all()), "the other generation was written"
        assert bool((mailbox.memory.local[group.layout.payload.offset :] == 0xFF).all())


def test_nan_query_and_nan_key_poison_exactly_their_rows() -> None:
    geometry = Geometry(capacity=3)
    inputs = make_group_inputs(geometry, [[40, 40, 40] for _ in range(8)], seed=5)
    inputs.query[2, 0, 3, 17] = float("nan")  # rank 2's own head 3, row 0
    inputs.query[5, 1, 0, 0] = -float("nan")
    inputs.rows[6, 2, 7] = 4095
    inputs.rows[:, :2][inputs.rows[:, :2] == 4095] = 4094
    for sign in (0x7F, 0xFF):
        inputs.cache[6, 4095, 100] = sign
        group = StageGroup(geometry, 3)
        merged = group.step(inputs)
        nan = torch.isnan(merged)
        expected = torch.zeros_like(nan)
        expected[2, 0, 3] = True
        expected[5, 1, 0] = True
        expected[:, 2] = True
        assert torch.equal(nan, expected)
        assert bool((merged.view(torch.int16)[nan] == numerics.BF16_NAN).all())
        group.check_as_new(1)


@pytest.mark.parametrize("push", [True, False], ids=["push", "local"])
def test_a_missing_rank_is_named_and_the_rest_returns_at_once(push: bool) -> None:
    geometry = Geometry(capacity=5)
    inputs = make_group_inputs(geometry, ragged_counts(8, 5), seed=6)
    group = StageGroup(geometry, 5, push, poison=False)
    group.push_queries(inputs, skip=3)
    torch.cuda.synchronize()
    before = group.value_bytes()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(group.stream)
    group.decode(inputs, deadline=20_000_000)
    group.merge(deadline=20_000_000)
    end.record(group.stream)
    torch.cuda.synchronize()
    # Eight ranks' decodes expire one after the other (20 ms each); every merge finds its abort word set.
    assert start.elapsed_time(end) < 8 * 20 + 100
    for mailbox in group.mailboxes:
        wait = read_record(mailbox)
        assert wait is not None
        assert (wait.stage, wait.waiting_rank, wait.source_rank, wait.use) == (
            Stage.SPARSE.name, mailbox.rank, 3, 0,
        )  # fmt: skip
        assert 36 <= wait.head < 48
    if push:
        # The words of heads 36 .. 47 never came: their tiles pushed nothing anywhere.
        for owner, (old, new) in enumerate(zip(before, group.value_bytes(), strict=True)):
            if owner == 3:
                assert torch.equal(old, new)


def test_a_missing_source_is_named_by_the_merge() -> None:
    geometry = Geometry(capacity=5)
    inputs = make_group_inputs(geometry, [[16] * 5 for _ in range(8)], seed=7)
    group = StageGroup(geometry, 5, poison=False)
    group.push_queries(inputs)
    skipped = group.mailboxes.pop(6)
    group.decode(inputs)
    group.mailboxes.insert(6, skipped)
    torch.cuda.synchronize()  # its query push, on another stream, has read the number
    skipped.use_counter(Stage.QUERY).add_(1)
    group.merge(deadline=10_000_000)
    torch.cuda.synchronize()
    for mailbox in group.mailboxes:
        wait = read_record(mailbox)
        assert wait is not None
        assert (wait.stage, wait.source_rank, wait.word) == (Stage.MERGE.name, 6, 0)


def test_poisoned_bytes_would_be_seen() -> None:
    """Negative control: a merge that is never launched leaves the poison that `step` looks at."""
    geometry = Geometry(capacity=2)
    group = StageGroup(geometry, 2)
    group.merge = lambda: None  # type: ignore[method-assign]
    merged = group.step(make_group_inputs(geometry, [[8, 8] for _ in range(8)], seed=8))
    assert bool(torch.isnan(merged).all())
