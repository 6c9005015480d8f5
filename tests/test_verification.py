"""What verification finds: the needle through the real mailboxes, and the faults that must not pass a run.

Each fault replaces one method of the product for one test; without it the same check passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from cpu_group import ROUTES, Group, Inputs, make_inputs, verify
from needle_address import address

from dcp_decode import cache, numerics, run, verification
from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.cpu.attention import Partial, sparse_attention
from dcp_decode.cpu.stages import CpuStages, LocalPartial
from dcp_decode.errors import VERIFIED, WRONG_RESULT, WrongResult
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import Stage
from dcp_decode.needle import build_needle
from dcp_decode.presentation import publish
from dcp_decode.records import RankRecord, make_plan
from dcp_decode.results import conclude
from dcp_decode.run import run_rank
from dcp_decode.step import RankState, Selection
from dcp_decode.summary import RunSummary
from dcp_decode.verification import check_needle_group
from dcp_decode.waits import MailboxTimeout

# 60 keys over 8 ranks: sources of 8 and of 7 keys, so that weights differ between slots.
NEEDLE = Geometry(heads=16, dcp=8, topk=60, capacity=3, padded_heads=16)


def needle(group: Group, route: str, seed: int = 1) -> None:
    check_needle_group(group.ranks, group.geometry, route, seed)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("dcp", "heads", "topk", "capacity", "interleave"),
    [(8, 96, 600, 2, 1), (1, 16, 2048, 2, 1), (8, 16, 60, 1, 1), (16, 16, 5, 2, 1), (4, 16, 300, 2, 64)],
)
def test_needle_passes(route: str, dcp: int, heads: int, topk: int, capacity: int, interleave: int) -> None:
    geometry = Geometry(heads=heads, dcp=dcp, topk=topk, capacity=capacity, padded_heads=heads, interleave=interleave)
    group = Group(geometry)
    needle(group, route)
    assert group.armed_as_new()


class SwapsValues(CpuStages):
    """Rank 3 weighs the values of its first two keys of row 0 by each other's probability."""

    def _attend(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> Partial:
        if self.rank == 3:
            cache, (one, other) = cache.clone(), rows[0, :2].tolist()
            cache[[one, other], : numerics.LATENT_DIM] = cache[[other, one], : numerics.LATENT_DIM]
        return super()._attend(cache, rows, valid)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("heads", "dcp", "topk"), [(96, 8, 2048), (96, 8, 96), (16, 16, 48), (16, 4, 513)])
def test_every_head_gets_the_value_of_the_key_that_it_addresses(heads: int, dcp: int, topk: int, route: str) -> None:
    """Through the mailboxes: another head, row, source or pairing of probability and value would show."""
    geometry = Geometry(heads=heads, dcp=dcp, topk=topk, capacity=2, padded_heads=heads)
    addressed = address(build_needle(topk, 3, geometry), 3, geometry)
    targets = torch.randperm(topk, generator=torch.Generator().manual_seed(9))[torch.arange(2 * heads) % topk]
    targets = targets.view(2, heads)
    places = [(torch.arange(topk) % dcp == rank).nonzero()[:, 0] for rank in range(dcp)]
    rows = [torch.full((2, topk), -1, dtype=torch.int32) for _ in places]
    for own, place in zip(rows, places, strict=True):
        own[:, : len(place)] = place
    first, second = places[3][:2].tolist()
    targets[0, 0] = first
    query = (numerics.e4m3_values(addressed.queries(targets), torch.float32) * geometry.q_scale).bfloat16()
    inputs = Inputs(
        query,
        (addressed.key_bytes,) * dcp,
        tuple(rows),
        tuple(torch.tensor([len(place)] * 2, dtype=torch.int32) for place in places),
    )
    assert addressed.misses(Group(geometry).run(inputs, route).merged, targets) == []
    # Every key still counts once, so the needle of a run can't see it.
    needle(Group(geometry, stages=SwapsValues), route)
    misses = addressed.misses(Group(geometry, stages=SwapsValues).run(inputs, route).merged, targets)
    assert misses[0] == (first, second)
    assert {wanted for wanted, _ in misses} <= {first, second}


class DropsKey(CpuStages):
    """Rank 3 loses the first key of row 0: the others move up and the count is right for what is left."""

    def _attend(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> Partial:
        if self.rank == 3:
            rows, valid = rows.clone(), valid.clone()
            rows[0, :-1] = rows[0, 1:].clone()
            valid[0] -= 1
        return super()._attend(cache, rows, valid)


class DoublesKey(CpuStages):
    """Rank 3 reads the first key of row 0 twice and the second not at all."""

    def _attend(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> Partial:
        if self.rank == 3:
            rows = rows.clone()
            rows[0, 1] = rows[0, 0]
        return super()._attend(cache, rows, valid)


class SwapsSlots(CpuStages):
    """The payload of row 0 from source 0 (8 keys) and source 7 (7 keys) is taken from each other's slot."""

    def merge(self, batch: int, after: Stage) -> torch.Tensor:
        payload = self._payload[self.rank][0, :, 0]
        payload[[0, 7]] = payload[[7, 0]]
        return super().merge(batch, after)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (DropsKey, r"needle row .*: key 3 was not counted"),
        (DoublesKey, r"needle row .*columns miscounted"),
        (SwapsSlots, r"needle row .*columns miscounted"),
    ],
)
def test_needle_finds(fault: type[CpuStages], message: str, route: str) -> None:
    needle(Group(NEEDLE), route)
    with pytest.raises(WrongResult, match=message) as caught:
        needle(Group(NEEDLE, stages=fault), route)
    assert caught.value.exit_code == WRONG_RESULT


class KeepsQuery(CpuStages):
    """Stage 2 does not re-arm its query words."""

    def _attend(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> Partial:
        own = self._query[self.rank]
        before = own.clone()
        partial = super()._attend(cache, rows, valid)
        own.copy_(before)
        return partial


class KeepsQueryOfEmptyRows(CpuStages):
    """An empty row neither waits for its query words nor re-arms them."""

    def _attend(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> Partial:
        if valid.any():
            return super()._attend(cache, rows, valid)
        self._finish(Stage.QUERY)
        query = torch.zeros(len(valid), self.geometry.heads, numerics.ROW_BYTES, dtype=torch.uint8)
        return sparse_attention(query, cache, rows, valid, self.geometry)


class KeepsValues(CpuStages):
    """Stage 3 re-arms neither LSE nor payload."""

    def merge(self, batch: int, after: Stage) -> torch.Tensor:
        kept = self._lse[self.rank], self._payload[self.rank]
        before = [section.clone() for section in kept]
        merged = super().merge(batch, after)
        for section, words in zip(kept, before, strict=True):
            section.copy_(words)
        return merged


SMALL = Geometry(heads=16, dcp=4, topk=8, capacity=2, padded_heads=16)


def run_with_a_late_query(stages: type[CpuStages], first_counts: int) -> Group:
    """Uses 0 and 1 in order, then a use in which rank 2 pushes its query only after all others have decoded."""
    group = Group(SMALL, deadline_seconds=0.1, stages=stages)
    for use in range(2):
        group.run(make_inputs(SMALL, [[first_counts]] * 4, seed=use))
    late = make_inputs(SMALL, [[5]] * 4, seed=2)
    group.push_queries(late.query, [0, 1, 3])
    group.decode(late, "push", [0, 1, 3])
    group.push_queries(late.query, [2])
    group.decode(late, "push", [2])
    merged = torch.cat([rank.merge(1, Stage.SPARSE) for rank in group.ranks], dim=1)
    verify(late, merged, SMALL)
    return group


@pytest.mark.parametrize(("fault", "first_counts"), [(KeepsQuery, 4), (KeepsQueryOfEmptyRows, 0)])
def test_query_words_left_behind_are_found(fault: type[CpuStages], first_counts: int) -> None:
    """A late query is waited for (here: in vain); words left behind by an earlier use pass for it, with wrong rows."""
    with pytest.raises(MailboxTimeout, match="waited for rank 2 in SPARSE"):
        run_with_a_late_query(CpuStages, first_counts)
    with pytest.raises(WrongResult):
        run_with_a_late_query(fault, first_counts)
    group = Group(SMALL, stages=fault)
    group.run(make_inputs(SMALL, [[first_counts]] * 4))
    assert not group.armed_as_new()


def merge_before_the_last_push(stages: type[CpuStages]) -> None:
    """The use after next, merged by rank 0 before rank 3 has pushed its partial."""
    group = Group(SMALL, deadline_seconds=0.1, stages=stages)
    for use in range(2):
        group.run(make_inputs(SMALL, [[4]] * 4, seed=use))
    early = make_inputs(SMALL, [[5]] * 4, seed=2)
    group.push_queries(early.query)
    group.decode(early, "push", [0, 1, 2])
    merged = group.ranks[0].merge(1, Stage.SPARSE)
    verify(replace(early, query=early.query[:, :4]), merged, SMALL)


def test_values_left_behind_are_found() -> None:
    with pytest.raises(MailboxTimeout, match="rank 0 waited for rank 3 in MERGE"):
        merge_before_the_last_push(CpuStages)
    with pytest.raises(WrongResult):
        merge_before_the_last_push(KeepsValues)
    group = Group(SMALL, stages=KeepsValues)
    group.run(make_inputs(SMALL, [[4]] * 4))
    assert not group.armed_as_new()


def small_config(route: str = "push", topk: int = 32, softmax_scale: float = 192**-0.5) -> RunConfig:
    """Four virtual ranks, one layer, two requests that reject and overwrite drafts, checked in every step."""
    synthetic = {"requests": 2, "input_length": 150, "output_length": 30}
    return load_config(
        None,
        {
            "model.heads": 16,
            "model.layers": 1,
            "model.topk": topk,
            "model.softmax_scale": softmax_scale,
            "parallel.dcp": 4,
            "parallel.fabric": "loopback",
            "parallel.route": route,
            "mailbox.capacity": 10,
            "mailbox.deadline_seconds": 20.0,
            "cache.pages": 8,
            "service.max_steps": 4,
            "workload.synthetic": synthetic,
        },
    )


def run_small(route: str = "push") -> RunSummary:
    return run_rank(small_config(route), SoloControlPlane())


def test_rows_without_any_error_are_verified_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One key a row: its value is a BF16 number, and the merged row equals the oracle's."""
    config = small_config(topk=1)
    summary = run_rank(config, SoloControlPlane())
    assert (summary.verified, summary.worst.error) == (True, 0.0)
    assert 0 < summary.worst.bound < 0.01
    record = RankRecord(0, 1, "host", "ok", VERIFIED, 0.0, report=asdict(summary.report()))
    plan = make_plan("run", config, "builtin", str(tmp_path / "run.json"))
    publish(conclude(plan, {0: record}), plan)
    assert "yes, 4 steps, worst error 0.000% of at most 0." in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["every", "sample", "off"])
def test_the_needle_is_looked_for_before_every_verified_run(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(*_: object) -> None:
        raise WrongResult("a needle was lost")

    monkeypatch.setattr(run, "check_needle_group", miss)
    config = small_config()
    config = config.model_copy(update={"verify": config.verify.model_copy(update={"mode": mode})})
    if mode == "off":
        assert run_rank(config, SoloControlPlane()).verified is None
    else:
        with pytest.raises(WrongResult, match="a needle was lost"):
            run_rank(config, SoloControlPlane())


def test_the_worst_row_has_its_number_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are checked at once."""
    worst = run_small().report().worst_row
    monkeypatch.setitem(verification.ROWS_AT_ONCE, "cpu", 1)
    assert run_small().report().worst_row == worst
    assert worst is not None
    assert re.fullmatch(r"step \d, layer 0, rank \d, row [1-9]", worst)


@pytest.mark.parametrize("scale", [1e3, 1e5])
def test_bounds_within_which_a_row_of_zeros_passes_verify_nothing(scale: float) -> None:
    """At 1e5 some bounds are infinite too, though not that of the row that comes nearest to its own."""
    with pytest.raises(WrongResult, match=r"step 0, layer 0, rank 0: at these scales a row is allowed an error of "):
        run_rank(small_config(softmax_scale=scale), SoloControlPlane())


class NaturalLog(CpuStages):
    """The partial's natural-log LSE is pushed where a base-2 one belongs."""

    def _push(self, stage: Stage, rows: torch.Tensor, lse_log2: torch.Tensor) -> None:
        super()._push(stage, rows, lse_log2 * numerics.LN_2)


class UnconvertedLog(CpuStages):
    """The local route pushes the LSE in the base in which it is stored."""

    def value_push(self, partial: LocalPartial) -> None:
        super().value_push(replace(partial, lse_ln=partial.lse_ln * numerics.LN_2))


@pytest.mark.parametrize(("route", "fault"), [("push", NaturalLog), ("local", NaturalLog), ("local", UnconvertedLog)])
def test_wrong_lse_base_is_found(route: str, fault: type[CpuStages], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_small(route).verified is True
    monkeypatch.setattr(run, "CpuStages", fault)
    with pytest.raises(WrongResult, match=r"step 0, layer 0, rank 0.*head"):
        run_small(route)


def swap_positions(selection: Selection) -> Selection:
    """The first two positions of row 1 in each other's place, as an unsorted selection would have them."""
    positions = selection.positions.clone()
    positions[1, :2] = positions[1, [1, 0]]
    return replace(selection, positions=positions)


def swap_rows(selection: Selection) -> Selection:
    """The cache rows of batch rows 0 and 5 (two requests) in each other's place, as far as both have some."""
    rows = selection.rows.clone()
    count = int(selection.valid[[0, 5]].min())
    rows[[0, 5], :count] = rows[[5, 0], :count]
    return replace(selection, rows=rows)


def shift_row(selection: Selection) -> Selection:
    """The last selected cache row of batch row 2 is the one before it: one key twice, one not at all."""
    rows = selection.rows.clone()
    last = int(selection.valid[2]) - 1
    rows[2, last] = rows[2, last - 1]
    return replace(selection, rows=rows)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (swap_positions, r"step 0, layer 0, rank 0, row 1: the selection of \d+ own positions differs"),
        (swap_rows, r"step 0, layer 0, rank 0, counting rows from 0: row 0 head"),
        (shift_row, r"step 0, layer 0, rank 0, counting rows from 0: row 2 head"),
    ],
)
def test_wrong_selection_is_found(
    fault: Callable[[Selection], Selection], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = RankState.select
    monkeypatch.setattr(RankState, "select", lambda *arguments: fault(select(*arguments)))
    with pytest.raises(WrongResult, match=message) as wrong:
        run_small()
    place = None if fault is swap_positions else message.partition(", counting")[0]
    found = wrong.value
    assert (found.place and found.place.rpartition(", row ")[0]) == place
    assert (found.error is None) is (found.bound is None) is (place is None)


def test_drafts_that_are_not_appended_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of the batch (row 4 of its block of five) then reads a slot that was never written: NaN bytes."""
    append = RankState.append
    monkeypatch.setattr(
        RankState, "append", lambda state, layer, batch: append(state, layer, replace(batch, rows=batch.rows[:-1]))
    )
    with pytest.raises(WrongResult, match=r"step 0, .* rows from 5: row 4 head") as wrong:
        run_small()
    assert (wrong.value.error, wrong.value.bound, wrong.value.place) == (None, None, None)  # the rows are NaN


def test_a_rejected_draft_left_in_the_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is written once only: right until the first step that overwrites a rejected draft."""
    append = cache.FlatCache.append
    written = set()

    def append_once(self: cache.FlatCache, layer: int, flat: torch.Tensor, values: torch.Tensor) -> None:
        slot = (id(self), layer, int(flat[0]))
        if slot not in written:
            append(self, layer, flat, values)
        written.add(slot)

    monkeypatch.setattr(cache.FlatCache, "append", append_once)
    with pytest.raises(WrongResult, match="step 1,"):
        run_small()
