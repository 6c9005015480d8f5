"""A whole checkpoint on the CPU, with stand-ins for kernels and clock: what it measures, gates and reports."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("cutlass")

import checkpoint_kernels  # noqa: E402

from dcp_decode.checkpoint import floors, measure, ranks  # noqa: E402
from dcp_decode.checkpoint.inputs import KeyCaches, L2Eviction  # noqa: E402
from dcp_decode.checkpoint.peers import Candidate  # noqa: E402
from dcp_decode.checkpoint.peers.plain_torch import PlainTorch  # noqa: E402
from dcp_decode.checkpoint.peers.triton_split_kv import TritonSplitKv  # noqa: E402
from dcp_decode.checkpoint.points import Shape  # noqa: E402
from dcp_decode.checkpoint.presentation import points_table  # noqa: E402
from dcp_decode.checkpoint.rank import report_of  # noqa: E402
from dcp_decode.checkpoint.summary import notes, own_points, scalings  # noqa: E402
from dcp_decode.checkpoint.timing import Series, Subject  # noqa: E402
from dcp_decode.config import RunConfig, load_config  # noqa: E402
from dcp_decode.errors import WaitFailed, WrongResult  # noqa: E402
from dcp_decode.fabric.placement import Placement  # noqa: E402
from dcp_decode.geometry import Geometry  # noqa: E402

LAYERS = 6
PLACEMENT = Placement("loopback", torch.device("cpu"), False, "")


class Clock:
    """Runs every subject's layers once in order, as a replay would, and gives each its own made-up time."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def measure(self, subjects: Sequence[Subject], samples: int, seed: int) -> dict[str, Series]:
        series = {}
        for number, subject in enumerate(subjects):
            subject.prepare()
            layers = subject.layers or self.layers
            for layer in range(layers):
                subject.launch(layer)
            subject.finish(layers)
            layer_us = 1.0 + number + np.arange(samples) / 1000
            series[subject.name] = Series(layer_us, layer_us * self.layers)
        return series


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    checkpoint_kernels.install(monkeypatch)
    monkeypatch.setattr(measure, "architecture_of", lambda device: "sm_90a")
    monkeypatch.setattr(measure, "KeyCaches", partial(KeyCaches, part_rows=256, device="cpu"))
    monkeypatch.setattr(measure, "L2Eviction", partial(L2Eviction, "cpu", 64))
    monkeypatch.setattr(measure, "Stopwatch", Clock)
    monkeypatch.setattr(measure.Checkpoint, "layers_of", lambda *_: LAYERS)
    monkeypatch.setattr(measure, "ALL_PEERS", (PlainTorch(), TritonSplitKv()))
    monkeypatch.setattr(measure, "describe_device", lambda device: {"clocks": None})
    monkeypatch.setattr(floors, "measure_platform", lambda eviction: floors.Platform(4.0, 200.0, 500.0))
    monkeypatch.setattr(floors, "describe_platform", lambda platform: {})
    monkeypatch.setattr(floors, "floor_subjects", lambda *_: [Subject("launch", lambda layer: None)])
    monkeypatch.setattr(floors, "fastest_gather", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_config(**overrides: object) -> RunConfig:
    settings: dict[str, object] = {
        "model.heads": 16, "model.topk": 32, "model.layers": LAYERS, "parallel.dcp": 2, "service.draft_tokens": 1,
        "checkpoint.samples": 5, "checkpoint.batches": [1, 3], "checkpoint.compared_batches": [1],
        "checkpoint.sweep": True, "checkpoint.fused_chain": True,
    }  # fmt: skip
    return load_config(None, settings | overrides)


def run(config: RunConfig, quick: bool = False, slowdown: float = 0.0) -> tuple[measure.Measurements, list[str]]:
    lines: list[str] = []
    checkpoint = measure.Checkpoint(config, quick, slowdown)
    measured = checkpoint.run(lambda done, total, line: lines.append(f"{done}/{total} {line}"))
    json.dumps(measured.keys, allow_nan=False)
    return measured, lines


def document_of(config: RunConfig, measured: measure.Measurements) -> dict[str, Any]:
    return measured.keys | {"config": config.model_dump()}


def entries(keys: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [point for point in keys["points"] if all(point[name] == value for name, value in wanted.items())]


def test_points_peers_floors_sweep_and_step_are_all_there() -> None:
    measured, lines = run(small_config())
    keys = measured.keys
    assert [(point["batch"], point["l2"]) for point in keys["points"]] == [
        (batch, l2) for batch in (2, 1, 3) for l2 in ("hot", "cold")
    ]
    assert len(lines) == 6
    assert lines[-1].startswith("6/6 3 x 16, 16 heads, cold: query_push ")
    for point in keys["points"]:
        compared = point["batch"] != 3
        assert list(point["stages"]) == ["query_push", "sparse_decode", "merge", "chain", "fused_chain"]
        assert point["variant_alone"] == f"{point['variant']}_end"
        assert {len(stage["rounds_us"]) for stage in point["stages"].values()} == {5 if compared else 0}
        assert set(point["floors"]) == {"launch", "bytes", "dependent_loads", "wire"}
        assert [peer["name"] for peer in point["peers"]] == (["torch", "triton_split_kv"] if compared else [])
    torch_peer, triton_peer = keys["points"][0]["peers"]
    assert torch_peer["skipped"] is None
    assert 0 < torch_peer["error"] < 0.05
    assert triton_peer["skipped"] == "triton is not installed"
    assert {(entry["batch"], entry["l2"]) for entry in keys["sweep"]} == {
        (b, l2) for b in (2, 1) for l2 in ("hot", "cold")
    }
    assert [entry["batch"] for entry in keys["layout"]] == [2, 1]
    assert [step["stage"] for step in keys["step"]] == ["chain", "fused_chain"] * 6
    assert all(step["within"] and step["layers"] == LAYERS for step in keys["step"])
    assert keys["failures"] == []
    assert measured.passed.worst.error <= measured.passed.worst.bound


def test_the_fused_chain_is_timed_only_when_asked_for() -> None:
    point = run(small_config(**{"checkpoint.fused_chain": False}), quick=True)[0].keys["points"][0]
    assert list(point["stages"]) == ["query_push", "sparse_decode", "merge", "chain"]


def test_a_slowdown_makes_every_stage_spin_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    spun: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append)
    keys = run(small_config(**{"parallel.route": "local"}), quick=True, slowdown=0.2)[0].keys
    stages = keys["points"][0]["stages"]
    assert len(stages) == 5
    # A point's share: five stages, each once at the end of a graph, and the two spins of every layer that calibrate.
    assert len(spun) == len(keys["points"]) * (len(stages) + 2 * LAYERS)
    assert keys["failures"] == []


def test_quick_measures_the_own_point_alone() -> None:
    keys = run(small_config(), quick=True)[0].keys
    assert [(point["batch"], point["l2"]) for point in keys["points"]] == [(2, "hot"), (2, "cold")]
    assert keys["profile"] == "quick"
    assert keys["sweep"] == []


def test_local_route_has_its_fourth_stage_and_loopback_no_peers() -> None:
    local = run(small_config(**{"parallel.route": "local"}), quick=True)[0].keys
    assert list(local["points"][0]["stages"]) == ["query_push", "sparse_decode", "value_push", "merge", "chain"]
    loopback = run(small_config(**{"checkpoint.mode": "loopback"}), quick=True)[0].keys
    assert {point["mode"] for point in loopback["points"]} == {"loopback"}
    assert all(point["peers"] == [] for point in loopback["points"])
    assert all("fused_chain" not in point["stages"] for point in local["points"] + loopback["points"])


def spoil_sparse(monkeypatch: pytest.MonkeyPatch, spoilt: Callable[[Any, Any], bool], row: int = 0) -> None:
    """The sparse decode pushes a wrong word of a row where `spoilt` says so of its configuration and mailbox."""
    honest = ranks.run_sparse

    def run_sparse(config: Any, mailbox: Any, *others: Any) -> None:
        honest(config, mailbox, *others)
        if spoilt(config, mailbox):
            mailbox.layout.payload.view(mailbox.memory.regions[0])[0, 1, row, 0, 0] += 1

    monkeypatch.setattr(ranks, "run_sparse", run_sparse)


def test_point_with_a_wrong_result_is_named_and_fails_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_sparse(monkeypatch, lambda config, mailbox: mailbox.geometry.capacity == 3, row=2)
    measured, lines = run(small_config())
    assert {point["batch"] for point in measured.keys["points"]} == {2, 1}
    assert len(measured.keys["failures"]) == 2
    assert measured.keys["failures"][0].startswith(
        "3 x 16, 16 heads, hot, sparse_decode, layer 0, rank 1: row 2 head 0"
    )
    assert lines[-1].startswith("6/6 WRONG 3 x 16, 16 heads, cold")
    report = report_of(PLACEMENT, small_config(), measured)
    assert report.verified is False
    assert report.error == measured.keys["failures"][0]
    assert report.worst_error > report.error_bound
    assert report.worst_row == "3 x 16, 16 heads, hot, sparse_decode, layer 0, rank 1, row 2"
    assert report.stages.keys() == measured.keys["points"][0]["stages"].keys()
    assert report.family == "probabilities"
    right = report_of(PLACEMENT, small_config(), run(small_config(), True)[0])
    assert (right.verified, right.error) == (True, None)


def test_own_point_that_failed_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_sparse(monkeypatch, lambda config, mailbox: mailbox.geometry.capacity == 2)
    measured, _ = run(small_config())
    report = report_of(PLACEMENT, small_config(), measured)
    assert (report.verified, report.stages) == (False, {})
    document = document_of(small_config(), measured) | {"verified": False}
    assert own_points(document) == {}
    assert [(curve.axis, curve.l2, curve.extents) for curve in scalings(document)] == [
        ("batch", l2, [1, 3]) for l2 in ("hot", "cold")
    ]
    assert sum(line.startswith("WRONG RESULT") for line in notes(document)) == 2
    pytest.importorskip("matplotlib")
    from dcp_decode.checkpoint.report import render_report

    with pytest.raises(LookupError, match="own point was not measured"):
        render_report(document)


def test_checkpoint_whose_points_all_fail_after_their_gates_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: measure._PointRun) -> None:
        raise WrongResult("a variant left other bits after the timing")

    monkeypatch.setattr(measure._PointRun, "_sweep", fail)
    config = small_config(**{"checkpoint.batches": [], "checkpoint.compared_batches": []})
    measured, _ = run(config)
    report = report_of(PLACEMENT, config, measured)
    assert (report.verified, report.stages, report.checked_steps) == (False, {}, 0)
    assert report.error == "a variant left other bits after the timing"
    assert (report.worst_error, report.error_bound) == (None, None)


@pytest.mark.parametrize(("launched", "label"), [("run_chain", "fused_chain"), ("run_sparse", "_bulk")])
def test_expired_wait_of_an_alternative_ends_the_checkpoint_as_a_wait(
    launched: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its gate, where it also leaves wrong rows."""
    honest = getattr(ranks, launched)

    def expiring(config: Any, mailbox: Any, *others: Any) -> None:
        honest(config, mailbox, *others)
        if launched == "run_chain" or "bulk" in config.name:
            mailbox.layout.payload.view(mailbox.memory.regions[0])[0, 1, 0, 0, 0] += 1
            mailbox.abort_word.fill_(1)

    monkeypatch.setattr(ranks, launched, expiring)
    with pytest.raises(WaitFailed, match=f"2 x 16, 16 heads, hot, .*{label}.*: a mailbox wait expired"):
        run(small_config())


def test_expired_wait_of_the_fused_chain_while_timing_ends_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ranks.run_chain
    calls = []

    def expiring(config: Any, mailbox: Any, *others: Any) -> None:
        honest(config, mailbox, *others)
        calls.append(None)
        if len(calls) == LAYERS:  # four of them were at the gate
            mailbox.abort_word.fill_(1)

    monkeypatch.setattr(ranks, "run_chain", expiring)
    with pytest.raises(WaitFailed, match="2 x 16, 16 heads, hot, while timing: a mailbox wait expired"):
        run(small_config(), quick=True)


def test_wrong_variant_is_left_out_of_the_sweep_and_its_point_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_sparse(monkeypatch, lambda config, mailbox: "bulk" in config.name)
    keys = run(small_config(**{"checkpoint.batches": [], "checkpoint.compared_batches": []}))[0].keys
    assert [point["l2"] for point in keys["points"]] == ["hot", "cold"]
    assert len(keys["failures"]) == 4
    assert all("_bulk" in failure for failure in keys["failures"])
    timed = {entry["variant"] for entry in keys["sweep"]}
    assert timed
    assert not any("_bulk" in name for name in timed)


def test_wrong_fused_chain_is_left_out_and_its_point_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ranks.run_chain

    def wrong(config: Any, mailbox: Any, *others: Any) -> None:
        honest(config, mailbox, *others)
        others[4][0, 0, 0] += 1

    monkeypatch.setattr(ranks, "run_chain", wrong)
    keys = run(small_config(), quick=True)[0].keys
    assert [list(point["stages"])[-1] for point in keys["points"]] == ["chain", "chain"]
    assert [failure[:40] for failure in keys["failures"]] == [
        "2 x 16, 16 heads, hot, fused_chain, laye",
        "2 x 16, 16 heads, cold, fused_chain, lay",
    ]


def test_fused_chain_that_drifts_is_left_out_and_its_point_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ranks.run_chain
    calls = []

    def drifting(config: Any, mailbox: Any, *others: Any) -> None:
        honest(config, mailbox, *others)
        calls.append(None)
        if len(calls) > 2 * LAYERS:
            others[4][0, 0, 0] += 1

    monkeypatch.setattr(ranks, "run_chain", drifting)
    keys = run(small_config(), quick=True)[0].keys
    assert [list(point["stages"])[-1] for point in keys["points"]] == ["chain", "chain"]
    assert [failure[:50] for failure in keys["failures"]] == [
        "2 x 16, 16 heads, hot, fused_chain, after the timi",
        "2 x 16, 16 heads, cold, fused_chain, layer 0, rank",
    ]
    assert [step["stage"] for step in keys["step"]] == ["chain", "chain"]


def test_other_bits_after_the_timing_are_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ranks.run_sparse
    calls = []

    def drifting(config: Any, mailbox: Any, *others: Any) -> None:
        honest(config, mailbox, *others)
        calls.append(None)
        # The last bit of an LSE: inside every bound, and still another result.
        if len(calls) > 2 * LAYERS:
            mailbox.layout.lse_log2.words(mailbox.memory.regions[0])[0, 1, 0, 0] ^= 1

    monkeypatch.setattr(ranks, "run_sparse", drifting)
    keys = run(small_config(), quick=True)[0].keys
    assert keys["failures"] == ["2 x 16, 16 heads, hot, sparse_decode: other bits after the timing than before"]
    assert [point["l2"] for point in keys["points"]] == ["cold"]


def test_peer_that_is_wrong_after_the_timing_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drifting(PlainTorch):
        def candidates(self, bench: ranks.BenchRanks) -> list[Candidate]:
            (honest,) = super().candidates(bench)
            launches = []

            def launch(layer: int) -> None:
                honest.launch(layer)
                launches.append(layer)
                if len(launches) > 2 * LAYERS:
                    honest.outputs()[0].mul_(2.0)

            return [replace(honest, launch=launch)]

    monkeypatch.setattr(measure, "ALL_PEERS", (Drifting(),))
    keys = run(small_config(**{"checkpoint.batches": [], "checkpoint.sweep": False}))[0].keys
    for point in keys["points"]:
        if point["batch"] == 2:
            assert point["peers"][0]["skipped"].startswith("after the timing: wrong result: error 1")
            assert point["peers"][0]["p50_us"] is None
    assert keys["failures"] == []


def test_a_point_s_memory_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []
    made = measure.BenchRanks

    def remembered(*arguments: Any) -> ranks.BenchRanks:
        bench = made(*arguments)
        alive.append(weakref.ref(bench))
        return bench

    monkeypatch.setattr(measure, "BenchRanks", remembered)
    run(small_config(), quick=True)
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_a_failed_point_s_memory_goes_with_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []
    honest, made = ranks.run_chain, measure.BenchRanks

    def remembered(*arguments: Any) -> ranks.BenchRanks:
        alive.append(weakref.ref(bench := made(*arguments)))
        return bench

    def wrong(config: Any, mailbox: Any, *others: Any) -> None:
        honest(config, mailbox, *others)
        others[4][0, 0, 0] += 1

    monkeypatch.setattr(measure, "BenchRanks", remembered)
    monkeypatch.setattr(ranks, "run_chain", wrong)
    checkpoint = measure.Checkpoint(small_config(), True, 0.0)
    checkpoint.run(lambda *_: None)
    gc.collect()
    assert len(checkpoint.failures) == 2
    assert [reference() for reference in alive] == [None, None]


def test_checkpoint_without_one_right_point_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "run_value", lambda config, mailbox, merged, *others: merged.zero_())
    with pytest.raises(WrongResult, match="2 x 16, 16 heads, hot, chain"):
        run(small_config(), quick=True)


def test_document_of_a_measurement_is_shown_as_a_table() -> None:
    measured = run(small_config(), quick=True)[0]
    document = document_of(small_config(), measured) | {"verified": True, "worst_error": 0.02, "error_bound": 0.03}
    assert points_table(document).row_count == 2
    assert any(line.startswith("verify step of 6 layers in one graph, chain, 2 x 16") for line in notes(document))


def test_compulsory_bytes_are_moved_once() -> None:
    """Keys with their row numbers, query bytes, BF16 partial rows and LSE."""
    found = floors.compulsory_bytes(Geometry(heads=96), Shape(5, 96, 256))
    assert found == 5 * 256 * (576 + 4) + 5 * 96 * (576 + 512 * 2 + 4)
