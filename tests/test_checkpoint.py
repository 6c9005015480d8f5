"""The checkpoint without a GPU: its points, statistics, wire model, layout choice, refusals and command line."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from checkpoint_document import document, point

from dcp_decode.checkpoint import summary
from dcp_decode.checkpoint.points import Shape, geometry_of, own_shape, plan_points
from dcp_decode.checkpoint.presentation import default_output, points_table, publish
from dcp_decode.checkpoint.summary import notes
from dcp_decode.checkpoint.variants import best_layout
from dcp_decode.checkpoint.wire import MEASURED_HOPS, PEER_BYTES_PER_MICROSECOND, hop_us, wire_of
from dcp_decode.cli import run_command
from dcp_decode.config import load_config
from dcp_decode.errors import BAD_INPUT, WRONG_RESULT, ConfigError, UnsupportedEnvironment
from dcp_decode.geometry import Geometry
from dcp_decode.records import RankRecord, RankReport, make_plan, read_plan, write_plan, write_record
from dcp_decode.results import Conclusion

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "latency_checkpoint.toml"


def test_own_point_comes_first_hot_and_cold() -> None:
    config = load_config(CONFIG)
    own = Shape(5, 96, 256)
    assert own_shape(config) == own
    planned = plan_points(config)
    assert [(one.shape, one.l2, one.compared, one.sweep) for one in planned[:2]] == [
        (own, "hot", True, True),
        (own, "cold", True, True),
    ]
    assert len({(one.shape, one.l2) for one in planned}) == len(planned)


def test_points_vary_one_extent_and_peers_run_at_the_compared_ones() -> None:
    config = load_config(CONFIG)
    planned = plan_points(config)
    own = own_shape(config)
    for one in planned:
        differing = [name for name in ("batch", "heads", "keys") if getattr(one.shape, name) != getattr(own, name)]
        assert len(differing) <= 1
    assert {one.shape.batch for one in planned} == set(config.checkpoint.batches)
    assert {one.shape.keys for one in planned} == set(config.checkpoint.keys)
    assert {one.shape.heads for one in planned} == set(config.checkpoint.heads)
    compared = {one.shape for one in planned if one.compared}
    assert compared == {own, *(Shape(batch, 96, 256) for batch in (1, 8, 16, 40)), Shape(5, 96, 2048)}
    quick = plan_points(config, quick=True)
    assert [one.shape for one in quick] == [own, own]
    assert not any(one.sweep for one in quick)


def test_geometry_of_a_shape_is_the_models_with_its_extents() -> None:
    config = load_config(None, {"mailbox.padded_heads": 128})
    own = geometry_of(config, Shape(3, 96, 32))
    assert (own.heads, own.padded_heads, own.capacity, own.dcp, own.topk) == (96, 128, 3, 8, 256)
    assert geometry_of(config, Shape(3, 64, 32)).padded_heads == 64


# TOML of [checkpoint] -> words of the refusal
REFUSED = {
    "mode = 'duo'": "checkpoint.mode = 'duo': must be one of solo, loopback, group",
    "samples = 2": "checkpoint.samples = 2: must be an integer in 3 .. ",
    "batches = 5": "checkpoint.batches = 5: must be a list; every entry must be an integer in 1 .. 512",
    "batches = [1, 0]": "checkpoint.batches.1 = 0: must be a list; every entry must be an integer in 1 .. 512",
    "keys = [257]": "checkpoint.keys = 257: must be at most model.topk = 256",
    "compared_keys = [2048]": "checkpoint.compared_keys = 2048: must be at most model.topk = 256",
    "heads = [104]": "checkpoint.heads = 104: every entry must be a multiple of 16",
    "sweep = 1": "checkpoint.sweep = 1: must be true or false",
}


@pytest.mark.parametrize(("text", "words"), REFUSED.items(), ids=REFUSED)
def test_bad_config_is_refused_in_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f"[checkpoint]\n{text}\n")
    assert run_command(["checkpoint", str(path)]) == BAD_INPUT
    assert capsys.readouterr().err.startswith(f"error: {words}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mode duo", "checkpoint.mode = 'duo'"),
        ("--samples 0", "checkpoint.samples = 0"),
        ("--render /nowhere.json", "--render = '/nowhere.json'"),
        ("/nowhere.toml", "config = '/nowhere.toml'"),
        ("--mode group --slowdown 0.2", "--slowdown = 0.2: needs checkpoint.mode = solo or loopback, not group\n"),
    ],
)
def test_bad_option_is_refused_in_one_line(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["checkpoint", *options.split()]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words}")
    assert error.count("\n") == 1


def test_launchers_get_a_plan_for_real_ranks_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["checkpoint", str(CONFIG), "--prepare", str(tmp_path), "--launcher", "torchrun"]
    assert run_command([*arguments, "--mode", "group"]) == 0
    assert capsys.readouterr().out == "8\n"
    plan = read_plan(tmp_path)
    assert (plan.command, plan.launcher, plan.processes) == ("checkpoint", "torchrun", 8)
    assert run_command(arguments) == BAD_INPUT
    assert "checkpoint.mode = 'solo' runs in one process: start it without torchrun" in capsys.readouterr().err


def test_conclusion_of_ranks_is_shown_as_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(CONFIG, {"checkpoint.mode": "group", "parallel.device": "cuda", "parallel.dcp": 2})
    output = tmp_path / "checkpoint.json"
    write_plan(tmp_path, make_plan("checkpoint", config, "torchrun", str(output)))
    made = document()
    keys = {
        key: made[key] for key in ("points", "failures", "step", "sweep", "layout", "platform", "wire", "peer_facts")
    }
    report = RankReport(
        fabric="nvshmem", device="cuda", family="seed", verified=True, worst_error=0.02, error_bound=0.03,
        checked_steps=10, digest="ab", requests={}, refusals=[], steps=0, tokens=0, acceptance=[],
        measurements=keys | {"mode": "group"},
    )  # fmt: skip
    for rank in range(2):
        write_record(tmp_path, RankRecord(rank, 100 + rank, "host", "ok", 0, time.time(), report=asdict(report)))
    assert run_command(["conclude", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == str(output)
    assert any("real ranks, maximum over ranks" in line for line in shown)
    written = json.loads(output.read_text())
    assert (written["command"], written["fabric"], written["ranks"]) == ("checkpoint", "nvshmem", 2)
    assert len(written["points"]) == len(made["points"])


def published(html: Path, tmp_path: Path, **changed: object) -> None:
    """A checkpoint that failed, as its command ends."""
    made = document() | {"exit_code": WRONG_RESULT, "error": "a row is wrong"} | changed
    plan = make_plan("checkpoint", load_config(CONFIG), "builtin", str(tmp_path / "checkpoint.json"))
    publish(Conclusion(WRONG_RESULT, "a row is wrong", (), made), plan, html)


@pytest.mark.parametrize(
    ("html", "changed", "reason"),
    [
        ("file/report.html", {}, "File exists"),
        ("/dev/full", {}, "No space left on device"),
        ("report.html", {"platform": {"copy_terabytes_per_second": 4.2}}, "LookupError: "),
    ],
)
def test_report_that_cannot_be_written_hides_neither_error_nor_document(
    html: str, changed: dict[str, object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    published(tmp_path / html, tmp_path, **changed)
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first.startswith(f"no HTML report {tmp_path / html}: {reason}")
    assert second == "error: a row is wrong"
    assert captured.out.splitlines()[-1] == str(tmp_path / "checkpoint.json")


def test_report_s_folder_is_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    published(tmp_path / "new" / "folder" / "report.html", tmp_path)
    assert (tmp_path / "new" / "folder" / "report.html").is_file()


def test_report_that_cannot_be_written_is_refused_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_command(["checkpoint", "--html", str(tmp_path / "file" / "report.html")]) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --html = ")
    assert captured.err.endswith("must be a file that can be written (Not a directory)\n")


def test_document_that_is_no_checkpoint_is_not_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document() | {"command": "run"}))
    assert run_command(["checkpoint", "--render", str(path)]) == BAD_INPUT
    assert "must be a checkpoint's JSON document" in capsys.readouterr().err


def test_document_of_another_version_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.json"
    for lost in ("wire", "step", "platform", "versions"):
        path.write_text(json.dumps({key: value for key, value in document().items() if key != lost}))
        assert run_command(["checkpoint", "--render", str(path)]) == BAD_INPUT
        error = capsys.readouterr().err
        assert "must be a document of this version" in error
        assert lost in error
        assert error.count("\n") == 1


@pytest.mark.xdist_group("launch")
def test_machine_without_a_gpu_is_refused_in_one_line(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    import subprocess
    import sys

    command = [sys.executable, "-m", "dcp_decode", "checkpoint", "--quick"]
    done = subprocess.run(command, cwd=CONFIG.parent.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == BAD_INPUT
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "no CUDA GPU" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("fabric", "shared"), [("loopback", False), ("nvshmem", True)])
def test_group_mode_refuses_ranks_that_share_a_gpu(fabric: str, shared: bool) -> None:
    torch = pytest.importorskip("torch")
    from dcp_decode.checkpoint.rank import refuse_shared_gpu
    from dcp_decode.fabric.placement import Placement

    device = torch.device("cuda", 0)
    with pytest.raises(UnsupportedEnvironment, match=r"needs 8 GPUs, one a rank.*--mode solo"):
        refuse_shared_gpu(Placement(fabric, device, shared, ""), 8)
    refuse_shared_gpu(Placement("nvshmem", device, False, ""), 8)


def test_group_mode_times_the_push_route_only() -> None:
    pytest.importorskip("torch")
    from dcp_decode.checkpoint.rank import run_group_rank

    local = load_config(CONFIG, {"parallel.route": "local"})
    with pytest.raises(ConfigError, match=r"parallel\.route = 'local': must be push"):
        run_group_rank(local, True, None)  # type: ignore[arg-type]


def test_layer_time_is_the_slope_between_two_graphs() -> None:
    from dcp_decode.checkpoint.timing import layer_series

    short, long = np.array([30.0, 28.0, 90.0]), np.array([120.0, 126.0, 121.0])  # one short replay was disturbed
    series = layer_series(short, long, (6, 24))
    assert np.allclose(series.layer, (long - 30.0) / 18)
    assert series.p50 == pytest.approx(91 / 18)
    statistics = series.statistics()
    assert statistics["samples"] == 3
    assert statistics["p50_us"] == pytest.approx(91 / 18)
    assert statistics["p50_us"] <= statistics["p95_us"] <= statistics["p99_us"] <= 96 / 18
    assert np.array_equal(series.step, long)


def test_group_takes_the_slowest_rank_of_every_round() -> None:
    from dcp_decode.checkpoint.timing import slowest_rank

    by_rank = np.array([[5.0, 7.0, 6.0], [6.0, 5.0, 6.0]])
    slowest, spread = slowest_rank(by_rank)
    assert slowest.tolist() == [6.0, 7.0, 6.0]
    assert spread.tolist() == [1.0, 2.0, 0.0]


def test_wire_model_goes_through_what_was_measured_and_then_by_bandwidth() -> None:
    for nbytes, microseconds in MEASURED_HOPS:
        assert hop_us(nbytes) == pytest.approx(microseconds)
    assert hop_us(1) == pytest.approx(MEASURED_HOPS[0][1])
    largest, last = MEASURED_HOPS[-1]
    assert hop_us(largest + 394_000) == pytest.approx(last + 394_000 / PEER_BYTES_PER_MICROSECOND)


def test_wire_of_a_layer_counts_what_leaves_a_rank() -> None:
    wire = wire_of(Geometry(), 5)
    assert wire.query_bytes == 7 * 5 * 12 * 576
    assert wire.value_bytes == 7 * 5 * 12 * (1024 + 4)
    assert wire.layer_us == pytest.approx(hop_us(wire.query_bytes) + hop_us(wire.value_bytes))
    assert 1.4 < wire.layer_us < 1.6
    assert wire_of(Geometry(dcp=1), 5).layer_us == 0


def test_layout_is_the_fastest_variant_over_hot_and_cold_with_dependent_launch() -> None:
    made = document()
    assert best_layout(made["sweep"]) == [
        {
            "batch": 5,
            "heads": 96,
            "keys": 256,
            "variant": "t2",
            "us": pytest.approx(8.0, rel=0.02),
            "default_us": pytest.approx(10.0, rel=0.02),
        }
    ]


def test_layout_takes_no_variant_that_failed_hot_or_cold() -> None:
    sweep = [entry for entry in document()["sweep"] if (entry["variant"], entry["l2"]) != ("t2", "cold")]
    assert [place["variant"] for place in best_layout(sweep)] == ["t1"]


def test_summary_finds_leads_floors_and_cliffs() -> None:
    made = document()
    own = summary.own_points(made)
    assert list(own) == ["hot", "cold"]
    peer, ratio = summary.lead(own["hot"])
    assert peer["name"] == "flash_mla_sparse_prefill"
    assert ratio == pytest.approx(10.6 / 5.0, rel=0.03)
    assert summary.lead(point(5, 256, 96, "hot")) is None
    assert summary.largest_floor(own["hot"]) == ("dependent_loads", 1.2)
    assert summary.modelled_chain(own["hot"]) == pytest.approx(own["hot"]["stages"]["chain"]["p50_us"] + 1.5)
    scalings = {(curve.axis, curve.l2): curve for curve in summary.scalings(made)}
    assert set(scalings) == {(axis, l2) for axis in ("batch", "keys") for l2 in ("hot", "cold")}
    assert scalings["batch", "hot"].extents == [1, 3, 5]
    extent, worst = scalings["batch", "hot"].worst_cliff("sparse_decode")
    assert (extent, worst) == (3, pytest.approx(1.0, abs=0.03))
    step = next(entry for entry in made["points"] if entry["batch"] == 3 and entry["l2"] == "hot")
    step["stages"]["sparse_decode"]["p50_us"] *= 1.5
    assert scalings["batch", "hot"].worst_cliff("sparse_decode")[1] > summary.CLIFF


def test_table_has_a_line_a_point_and_says_what_is_not_in_it() -> None:
    made = document()
    assert points_table(made).row_count == len(made["points"])
    text = "\n".join(notes(made))
    for words in ("no NVLink time", "wire, modelled and not in any figure above: 1.50 us", "at most 201.6 us",
                  "skipped peer torch: torch <is> not installed", "verified before and after"):  # fmt: skip
        assert words in text
    made["step"][0]["within"] = False
    made |= {"verified": False, "failures": ["5 x 256, hot, chain: row 3 head 7"]}
    assert "WRONG RESULT, not timed: 5 x 256, hot, chain: row 3 head 7" in "\n".join(notes(made))
    assert "verified before and after" not in "\n".join(notes(made))
    assert "MORE THAN 201.6 us" in "\n".join(notes(made))


def test_default_output_is_named_after_the_gpu() -> None:
    assert default_output({"device": {"name": "NVIDIA H200"}}, 0.0) == "results/checkpoint-h200-19700101T000000Z.json"
    assert default_output({"device": None}, 0.0).startswith("results/checkpoint-unknown-")
