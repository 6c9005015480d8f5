"""What the CPU stages leave in the mailboxes, and whom an expired wait names."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from cpu_group import ROUTES, Group, make_inputs

from dcp_decode import numerics, topk
from dcp_decode.cpu import arrival
from dcp_decode.errors import WAIT_EXPIRED, RankDied
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import RECORD_FIELDS, Stage
from dcp_decode.waits import MailboxTimeout, Wait, read_record, write_record

GEOMETRY = Geometry(heads=16, dcp=4, topk=8, capacity=5, padded_heads=32)
COUNTS = [[3, 0, 8], [1, 0, 0], [0, 0, 0], [4, 0, 0]]
H = GEOMETRY.owner_heads
DEADLINE = 0.2
PATTERN = 0x5A5A5A5A


def candidates(rank: int, batch: int) -> torch.Tensor:
    """Keys of distinct positions; a row of the last rank has one only, so that ABSENT travels too."""
    count = 1 if rank == 3 else 8
    scores = torch.arange(count, dtype=torch.float32)
    own = topk.local_candidates(scores, torch.arange(count) * 4 + rank, 8)
    return own.expand(batch, 8).contiguous()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("generations", [2, 3])
def test_every_use_leaves_the_mailboxes_armed_as_new(route: str, generations: int) -> None:
    geometry = Geometry(heads=16, dcp=4, topk=8, capacity=5, padded_heads=32, generations=generations)
    group = Group(geometry)
    assert group.armed_as_new()
    for use in range(2 * generations + 1):
        batch = 1 + use % 3
        for stages in group.ranks:
            stages.select_push(candidates(stages.rank, batch))
        assert not group.armed_as_new()  # the check can fail
        selected = [stages.select(batch) for stages in group.ranks]
        positions = torch.stack(selected)[:, batch - 1]
        assert positions[positions >= 0].sort().values.tolist() == expected_positions()
        group.run(make_inputs(geometry, [row[:batch] for row in COUNTS], seed=use), route)
        assert group.armed_as_new()
        counters = {stage: [int(box.use_counter(stage)) for box in group.mailboxes] for stage in Stage}
        assert counters[Stage.TOPK] == counters[Stage.QUERY] == counters[Stage.SPARSE] == [use + 1] * 4
        assert counters[Stage.MERGE] == [use] * 4  # the next use's query push counts it
        assert counters[Stage.PUSH] == [use + 1 if route == "local" else 0] * 4


def expected_positions() -> list[int]:
    everything = torch.cat([candidates(rank, 1)[0] for rank in range(4)])
    return topk.key_positions(everything.sort(descending=True).values[:8]).sort().values.tolist()


@pytest.mark.parametrize("route", ROUTES)
def test_words_outside_the_batch_and_the_heads_are_not_touched(route: str) -> None:
    """Rows from B on and head rows from `heads` on keep what they hold, in every section."""
    group = Group(GEOMETRY)
    batch = 3
    layout = group.layout
    for mailbox in group.mailboxes:
        region = mailbox.memory.local
        layout.topk.words(region)[:, :, batch:] = PATTERN
        layout.query.words(region)[:, batch:] = PATTERN
        layout.query.words(region)[:, :, GEOMETRY.heads :] = PATTERN
        layout.payload.words(region)[:, :, batch:] = PATTERN
        layout.lse_log2.words(region)[:, :, batch:] = PATTERN
    before = [mailbox.memory.local.clone() for mailbox in group.mailboxes]
    for _ in range(3):
        for stages in group.ranks:
            stages.select_push(candidates(stages.rank, batch))
        for stages in group.ranks:
            stages.select(batch)
        group.run(make_inputs(GEOMETRY, COUNTS), route)
        for mailbox, expected in zip(group.mailboxes, before, strict=True):
            start = layout.topk.offset
            assert torch.equal(mailbox.memory.local[start:], expected[start:])


def expect_timeout(action: Callable[[], object], **expected: object) -> Wait:
    """The wait of an action that must expire, with the fields expected, not before its deadline and soon after."""
    started = time.monotonic()
    with pytest.raises(MailboxTimeout) as caught:
        action()
    seconds = time.monotonic() - started
    assert DEADLINE <= seconds < DEADLINE + 2.0
    (wait,) = caught.value.waits
    assert {name: getattr(wait, name) for name in expected} == expected
    assert wait.value_seen == numerics.ARMED_WORD
    assert caught.value.exit_code == WAIT_EXPIRED
    assert caught.value.expired_waits == [wait.as_dict()]
    for part in (f"rank {wait.waiting_rank} waited for rank {wait.source_rank}", wait.stage, f"use {wait.use}"):
        assert part in str(caught.value)
    return wait


def group_after(uses: int) -> Group:
    group = Group(GEOMETRY, DEADLINE)
    for _ in range(uses):
        group.run(make_inputs(GEOMETRY, COUNTS))
    return group


def test_missing_candidates_are_named() -> None:
    group = group_after(0)
    for rank in (0, 1, 3):
        group.ranks[rank].select_push(candidates(rank, 2))
    expect_timeout(
        lambda: group.ranks[1].select(2), stage="TOPK", waiting_rank=1, source_rank=2, row=0, head=-1, word=0, use=0
    )


@pytest.mark.parametrize("uses", [0, 3])
def test_missing_query_is_named(uses: int) -> None:
    group = group_after(uses)
    inputs = make_inputs(GEOMETRY, COUNTS)
    group.push_queries(inputs.query, [0, 1, 3])
    expect_timeout(
        lambda: group.decode(inputs, "push", [3]),
        stage="SPARSE",
        waiting_rank=3,
        source_rank=2,
        row=0,
        head=2 * H,
        word=0,
        use=uses,
    )


def test_one_missing_query_word_is_named() -> None:
    group = group_after(1)
    inputs = make_inputs(GEOMETRY, COUNTS)
    group.push_queries(inputs.query)
    group.layout.query.words(group.mailboxes[0].memory.local)[1, 2, 7, 143] = numerics.ARMED_WORD
    # Row 2 is empty on ranks 1 to 3, and rank 0's query words are awaited for every row alike.
    expect_timeout(
        lambda: group.decode(inputs, "push", [0]), stage="SPARSE", source_rank=1, row=2, head=7, word=143, use=1
    )


@pytest.mark.parametrize(("route", "after"), [("push", Stage.SPARSE), ("local", Stage.PUSH)])
def test_missing_lse_and_payload_are_named(route: str, after: Stage) -> None:
    inputs = make_inputs(GEOMETRY, COUNTS)
    group = group_after(2) if route == "push" else Group(GEOMETRY, DEADLINE)
    uses = 2 if route == "push" else 0
    group.push_queries(inputs.query)
    group.decode(inputs, route, [0, 2, 3])
    expect_timeout(
        lambda: group.ranks[2].merge(3, after),
        stage="MERGE",
        waiting_rank=2,
        source_rank=1,
        row=0,
        head=0,
        word=0,
        use=uses,
    )
    group.decode(inputs, route, [1])
    group.layout.payload.words(group.mailboxes[3].memory.local)[0, 0, 2, H - 1, 255] = numerics.ARMED_WORD
    expect_timeout(
        lambda: group.ranks[3].merge(3, after),
        stage="MERGE",
        waiting_rank=3,
        source_rank=0,
        row=2,
        head=H - 1,
        word=255,
        use=uses,
    )
    # Rank 1 has all it needs and is not disturbed by the others' aborts.
    assert tuple(group.ranks[1].merge(3, after).shape) == (3, H, 512)


def test_expired_wait_aborts_its_rank_for_good() -> None:
    """Later waits return at once with the first record, even if the words come after all, and nothing is pushed."""
    group = group_after(0)
    inputs = make_inputs(GEOMETRY, COUNTS)
    group.push_queries(inputs.query, [0, 1, 3])
    first = expect_timeout(lambda: group.decode(inputs, "push", [3]), source_rank=2)
    group.push_queries(inputs.query, [2])
    for wait in (
        lambda: group.decode(inputs, "push", [3]),
        lambda: group.ranks[3].merge(3, Stage.SPARSE),
        lambda: group.ranks[3].select(3),
    ):
        started = time.monotonic()
        with pytest.raises(MailboxTimeout) as caught:
            wait()
        assert time.monotonic() - started < DEADLINE / 2
        assert caught.value.waits == [first]
    for mailbox in group.mailboxes:
        own = mailbox.memory.local
        assert bool((group.layout.payload.words(own)[:, 3] == numerics.ARMED_WORD).all())
        assert bool((group.layout.lse_log2.words(own)[:, 3] == numerics.ARMED_WORD).all())


def test_first_record_wins_and_keeps_every_field() -> None:
    mailbox = Group(GEOMETRY).mailboxes[2]
    assert read_record(mailbox) is None
    first = Wait("MERGE", 2, 1, 3, 4, 5, 2**31 - 1, -1, 7, 2**62 + 1)
    write_record(mailbox, first)
    write_record(mailbox, Wait("TOPK", *range(9)))
    assert read_record(mailbox) == first
    assert tuple(first.as_dict()) == RECORD_FIELDS


def test_late_words_within_the_deadline_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing query comes while the wait sleeps: no timeout, and the result is the one of a timely push."""
    inputs = make_inputs(GEOMETRY, COUNTS)
    expected = Group(GEOMETRY).run(inputs)
    group = Group(GEOMETRY, 20.0)
    group.push_queries(inputs.query, [0, 1, 3])
    sleep = time.sleep
    pauses = []

    def push_in_the_third_pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            group.push_queries(inputs.query, [2])
        sleep(seconds)

    monkeypatch.setattr(arrival.time, "sleep", push_in_the_third_pause)
    group.decode(inputs, "push")
    assert len(pauses) == 3
    merged = [stages.merge(3, Stage.SPARSE) for stages in group.ranks]
    assert torch.equal(torch.cat(merged, 1).view(torch.int16), expected.merged.view(torch.int16))


def test_dead_peer_ends_a_wait_long_before_the_deadline() -> None:
    group = Group(GEOMETRY, 60.0)
    inputs = make_inputs(GEOMETRY, COUNTS)
    group.push_queries(inputs.query, [0, 1, 3])
    group.ranks[0].arrival.dead_peers = lambda: {2: "process 7 ended"}
    started = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 2 process 7 ended; rank 0 waited for rank 2 in SPARSE") as caught:
        group.decode(inputs, "push", [0])
    assert time.monotonic() - started < 2.0
    assert caught.value.expired_waits[0]["source_rank"] == 2
