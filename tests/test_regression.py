"""The regression gate: false alarms of noise alone, slowdowns that it must see, and inputs that can't be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dcp_decode.cli import run_command
from dcp_decode.errors import BAD_INPUT, VERIFIED, WRONG_RESULT
from dcp_decode.regression.compare import Comparison, compare
from dcp_decode.regression.documents import IncomparableInputs
from dcp_decode.regression.interval import Estimate, estimate_percentiles, interval, student_quantile

ROUNDS = 40
SEEDS = range(40)
MICROSECONDS = {"query_push": 2.0, "sparse_decode": 5.0, "merge": 2.1, "chain": 9.0}
BASELINES = {"peer:own_local_route": 5.5, "peer:public": 17.0, "peer:triton_split_kv": 10.7, "floor:launch": 1.2}


def measurement(seed: int, slower: dict[str, float] | None = None, noise: float = 0.02, drift: float = 0.01) -> dict:
    """A checkpoint of one point as a machine would make it.

    noise: relative, of each time by itself, heavy-tailed and alike in neighbouring rounds. drift: a round's step of the
    random walk that all times of a round share (clocks, heat). slower: factor by stage.
    """
    random = np.random.default_rng(seed)
    load = np.cumsum(random.normal(size=ROUNDS)) * drift

    def times(microseconds: float) -> list[float]:
        own = random.standard_t(4, size=ROUNDS) * noise / np.sqrt(2)
        own[1:] += 0.3 * own[:-1]
        return (microseconds * np.exp(load + own)).tolist()

    factors = dict.fromkeys(MICROSECONDS, 1.0) | (slower or {})
    series = {name: factors[name] * value for name, value in MICROSECONDS.items()} | BASELINES
    entry = {
        "batch": 5,
        "heads": 96,
        "keys": 256,
        "l2": "cold",
        "variant": "any",
        "samples_us": {name: times(value) for name, value in series.items()},
    }
    device = {"name": "a GPU", "architecture": "sm_90"}
    return {"schema": 1, "command": "checkpoint", "device": device, "geometry": {"heads": 96}, "distributions": [entry]}


def samples(document: dict) -> dict[str, list[float]]:
    return document["distributions"][0]["samples_us"]


def drop_baselines(document: dict) -> None:
    for name in BASELINES:
        del samples(document)[name]


def slower_stages(comparison: Comparison) -> set[str]:
    return {stage.stage for stage in comparison.of_verdict("slower")}


def test_noise_alone_raises_no_alarm() -> None:
    comparisons = [compare(measurement(2 * seed), measurement(2 * seed + 1)) for seed in SEEDS]
    assert sum(bool(comparison.of_verdict("slower")) for comparison in comparisons) == 0
    # The interval itself is honest: with no allowance at all, the confidence's share of false alarms is not exceeded.
    strict = [compare(measurement(2 * seed), measurement(2 * seed + 1), limit=1.0, confidence=0.9) for seed in SEEDS]
    assert sum(bool(comparison.of_verdict("slower")) for comparison in strict) / len(SEEDS) <= 0.1


@pytest.mark.parametrize("stage", ["query_push", "sparse_decode"])
def test_a_slowdown_of_a_fifth_is_seen_every_time(stage: str) -> None:
    for seed in SEEDS:
        comparison = compare(measurement(2 * seed), measurement(2 * seed + 1, {stage: 1.2}))
        assert slower_stages(comparison) == {stage}
        found = comparison.of_verdict("slower")[0]
        assert 1.05 < found.change.low < 1.2 < found.change.high
        assert found.detectable < 1.2


def test_a_slowdown_of_two_percent_is_none() -> None:
    for seed in SEEDS:
        slower = dict.fromkeys(MICROSECONDS, 1.02)
        assert not slower_stages(compare(measurement(2 * seed), measurement(2 * seed + 1, slower)))


def test_a_slower_machine_is_no_slower_stage() -> None:
    base, new = measurement(1), measurement(2)
    for name, rounds in samples(new).items():
        samples(new)[name] = [1.5 * value for value in rounds]
    assert not slower_stages(compare(base, new))
    # Negative control: without baselines the same times are slower.
    for document in (base, new):
        drop_baselines(document)
    comparison = compare(base, new)
    assert slower_stages(comparison) == set(MICROSECONDS)
    assert any("no baseline" in note for note in comparison.notes)


def test_baselines_by_stage() -> None:
    baselines = {stage.stage: stage.baseline for stage in compare(measurement(1), measurement(2)).stages}
    peer, floor = "peer:triton_split_kv", "floor:launch"
    assert baselines == {"query_push": floor, "sparse_decode": peer, "merge": floor, "chain": peer}


def test_our_own_code_is_no_baseline() -> None:
    documents = [measurement(1), measurement(2)]
    for document in documents:
        samples(document)["peer:own_local_route"] = samples(document).pop("peer:triton_split_kv")
        del samples(document)["peer:public"]
    assert {stage.baseline for stage in compare(*documents).stages} == {"floor:launch"}


def test_pairing_by_round_removes_what_a_round_shares() -> None:
    shaky = compare(measurement(1, drift=0.2), measurement(2, drift=0.2))
    assert max(stage.detectable for stage in shaky.stages) < 1.2
    for document in (base := measurement(1, drift=0.2), new := measurement(2, drift=0.2)):
        drop_baselines(document)
    assert min(stage.detectable for stage in compare(base, new).stages) > 1.2


def as_points(document: dict) -> dict:
    """The same checkpoint in the form of contract section 7, with points that have no rounds besides."""

    def timed(prefix: str) -> dict[str, dict]:
        series = {name.removeprefix(prefix): rounds for name, rounds in samples(document).items() if prefix in name}
        return {name: {"p50_us": 1.0, "rounds_us": rounds} for name, rounds in series.items()}

    entry = document["distributions"][0]
    point = {
        **{key: entry[key] for key in ("batch", "heads", "keys", "l2", "variant")},
        "stages": {name: {"p50_us": 1.0, "rounds_us": samples(document)[name]} for name in MICROSECONDS},
        "peers": [{"name": name, "skipped": None} | timed for name, timed in timed("peer:").items()]
        + [{"name": "absent", "skipped": "not installed", "p50_us": None}],
        "floors": timed("floor:") | {"bytes": {"p50_us": 1.0}},
    }
    scaling = point | {"batch": 40, "stages": {"chain": {"p50_us": 1.0, "p95_us": 1.1, "samples": 9}}, "peers": []}
    rest = {key: value for key, value in document.items() if key != "distributions"}
    return rest | {"points": [point, scaling, scaling]}


def test_points_with_rounds_say_the_same_as_distributions() -> None:
    base, new = measurement(1), measurement(2, {"merge": 1.2})
    comparison = compare(as_points(base), as_points(new))
    assert comparison == compare(base, new)
    assert slower_stages(comparison) == {"merge"}


def run_document(seed: int, slower: dict[str, float] | None = None) -> dict:
    """A run's document: percentiles of the same times."""
    stages = {}
    for name, rounds in samples(measurement(seed, slower, drift=0.0)).items():
        p50, p95 = np.percentile(rounds, (50, 95))
        stages[name] = {"p50_us": p50, "p95_us": p95, "p99_us": None, "samples": ROUNDS}
    return {
        "schema": 1,
        "command": "run",
        "device": {"name": "a CPU"},
        "stages": {name: stages[name] for name in MICROSECONDS},
    }


def test_a_run_is_compared_by_its_percentiles() -> None:
    same = compare(run_document(1), run_document(2))
    assert not slower_stages(same)
    assert any("from percentiles" in note for note in same.notes)
    assert slower_stages(compare(run_document(1), run_document(2, {"merge": 1.3}))) == {"merge"}


def test_a_run_without_percentiles_or_with_few_samples_is_no_base_and_no_new_one() -> None:
    whole = run_document(1)
    for key, value, found in (("p95_us", None, "None, 40"), ("samples", 9, "9"), ("samples", None, "None")):
        lacking = run_document(2)
        lacking["stages"]["merge"][key] = value
        for which, documents in (("new", (whole, lacking)), ("base", (lacking, whole))):
            with pytest.raises(IncomparableInputs) as refusal:
                compare(*documents)
            start = f"stages.merge in {which} needs p50_us, p95_us and at least 10 samples, but has "
            assert str(refusal.value).startswith(start)
            assert str(refusal.value).endswith(f", {found}")
    least = run_document(2)
    least["stages"]["merge"]["samples"] = 10
    compare(whole, least)


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.975, 9, 2.2622), (0.999, 13, 3.8520), (0.9995, 20, 3.8495), (0.975, 10_000, 1.9602)],
)
def test_student_quantiles(probability: float, freedom: int, expected: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=2e-3)


def test_interval_of_percentiles() -> None:
    estimate = estimate_percentiles(10.0, 10.0, 100)
    assert interval(estimate, 0.99).ratio == pytest.approx(10.0)
    assert interval(estimate, 0.99).low == interval(estimate, 0.99).high
    wide = interval(Estimate(0.0, 0.1, 1000), 0.95)
    assert (wide.low, wide.high) == (pytest.approx(0.8218, rel=1e-3), pytest.approx(1.2168, rel=1e-3))


def other_device(document: dict) -> None:
    document["device"]["name"] = "another GPU"


def other_geometry(document: dict) -> None:
    document["geometry"]["heads"] = 64


def other_point(document: dict) -> None:
    document["distributions"][0]["batch"] = 1


def no_stage(document: dict) -> None:
    del samples(document)["merge"]


def no_baseline(document: dict) -> None:
    del samples(document)["peer:triton_split_kv"]


def few_rounds(document: dict) -> None:
    for rounds in samples(document).values():
        del rounds[3:]


def uneven_rounds(document: dict) -> None:
    samples(document)["merge"].pop()


def negative(document: dict) -> None:
    samples(document)["merge"][7] = -1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: document.update(schema=2), "schema = 2"),
        (lambda document: document.update(command="run"), "command: 'checkpoint' in base, 'run' in new"),
        (lambda document: document.pop("distributions"), "batch=5 heads=96 keys=256 l2=cold is missing in new"),
        (lambda document: document["distributions"].append(document["distributions"][0]), "is there twice in new"),
        (lambda document: document.update(verified=False), "verified = false in new"),
        (lambda document: document.pop("device"), "device = "),
        (other_device, "device.name: 'a GPU' in base, 'another GPU' in new"),
        (other_geometry, "geometry.heads: 96 in base, 64 in new"),
        (other_point, "batch=5 heads=96 keys=256 l2=cold is missing in new"),
        (no_stage, "merge has no rounds in new"),
        (no_baseline, "peer:triton_split_kv, the baseline of sparse_decode, has no rounds in new"),
        (few_rounds, "query_push in new has 3 rounds; at least 10 are needed"),
        (uneven_rounds, "merge in new has 39 rounds, floor:launch 40"),
        (negative, "distributions.0.samples_us.merge.7 = -1.0"),
    ],
)
def test_incomparable_inputs_name_the_field(change: Callable[[dict], object], message: str) -> None:
    new = measurement(2)
    change(new)
    with pytest.raises(IncomparableInputs) as refusal:
        compare(measurement(1), new)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_base_of_wrong_results_is_refused_too() -> None:
    base = measurement(1)
    base["verified"] = False
    with pytest.raises(IncomparableInputs, match="verified = false in base"):
        compare(base, measurement(2))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new, output = tmp_path / "base.json", tmp_path / "new.json", tmp_path / "comparison.json"
    base.write_text(json.dumps(measurement(1)))
    for document, code in ((measurement(2), VERIFIED), (measurement(2, {"chain": 1.2}), WRONG_RESULT)):
        new.write_text(json.dumps(document))
        assert run_command(["compare", str(base), str(new), "--output", str(output)]) == code
        assert capsys.readouterr().out.splitlines()[-1] == str(output)
        comparison = json.loads(output.read_text())
        assert (comparison["exit_code"], comparison["slower"]) == (code, int(code == WRONG_RESULT))
        assert len(comparison["stages"]) == 4
    # A larger limit allows it.
    assert run_command(["compare", str(base), str(new), "--limit", "1.4", "--output", str(output)]) == VERIFIED
    new.write_text("{")
    bad_limits = ([str(base), str(base), "--limit", limit] for limit in ("0.5", "nan"))
    for arguments in ([str(base), str(new)], [str(base), "absent.json"], *bad_limits):
        capsys.readouterr()
        assert run_command(["compare", *arguments]) == BAD_INPUT
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
