"""The injected slowdown of a checkpoint on a GPU, against a model of one whose launches overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from dcp_decode.checkpoint import slowdown  # noqa: E402
from dcp_decode.checkpoint.timing import Series, Subject, graph_lengths, layer_series  # noqa: E402

GRAPH_US, KERNEL_US, OVERLAP_US, SPIN_OVERHEAD_US, CYCLES_A_US = 5.0, 3.0, 1.2, 2.0, 1980.0
LATE_US = 15.0  # of a replay that the host enqueues late: 10 to 20 were seen, in up to 5 of 100 replays
LAYERS = 24
BOUNDS = (1.1, 1.3)  # of a slowdown of 20 %, see tests/gpu/test_checkpoint_gpu.py


class ModelStopwatch:
    """A GPU on which a kernel takes KERNEL_US, or OVERLAP_US less behind another one, and a spin what it says.

    overhead: microseconds of a spin's own launch. late: the share of replays that take LATE_US longer.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, overhead: float = SPIN_OVERHEAD_US, late: float = 0.0, seed: int = 0
    ) -> None:
        self.elapsed, self.overlaps, self.overhead, self.late = 0.0, False, overhead, late
        self.random = np.random.default_rng(seed)
        monkeypatch.setattr(torch.cuda, "_sleep", self.spin)

    def kernel(self, times: float = 1.0) -> None:
        self.elapsed += times * KERNEL_US - OVERLAP_US * self.overlaps
        self.overlaps = True

    def spin(self, cycles: int) -> None:
        assert isinstance(cycles, int)
        self.elapsed += self.overhead + cycles / CYCLES_A_US
        self.overlaps = False

    def measure(self, subjects: Sequence[Subject], samples: int, seed: int) -> dict[str, Series]:
        series = {}
        for subject in subjects:
            lengths = graph_lengths(subject.layers or LAYERS)
            short, long = (self._replay(subject, length) + self._lateness(samples) for length in lengths)
            series[subject.name] = layer_series(short, long, lengths)
        return series

    def _lateness(self, samples: int) -> np.ndarray:
        return LATE_US * (self.random.random(samples) < self.late)

    def _replay(self, subject: Subject, length: int) -> float:
        self.elapsed, self.overlaps = GRAPH_US, False
        for layer in range(length):
            subject.launch(layer)
        subject.finish(length)
        return self.elapsed


def stages(stopwatch: ModelStopwatch) -> list[Subject]:
    def launches(count: int) -> Callable[[int], None]:
        return lambda _layer: [stopwatch.kernel() for _ in range(count)] and None

    return [Subject("stage", launches(1), layers=12), Subject("chain", launches(3))]


@pytest.mark.parametrize("overhead", [0.0, SPIN_OVERHEAD_US, 20.0])
@pytest.mark.parametrize("share", [0.2, 1.5])
def test_a_layer_takes_just_its_share_longer(share: float, overhead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the spin's own launch takes."""
    stopwatch = ModelStopwatch(monkeypatch, overhead)
    plain = stages(stopwatch)
    before, after = (
        stopwatch.measure(subjects, 3, 0) for subjects in (plain, slowdown.slowed(plain, share, stopwatch))
    )
    assert list(before) == list(after)
    for name, series in before.items():
        assert after[name].p50 / series.p50 == pytest.approx(1 + share, rel=1e-3)


def test_no_slowdown_measures_nothing_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = ModelStopwatch(monkeypatch)
    plain = stages(stopwatch)
    assert slowdown.slowed(plain, 0.0, stopwatch) == plain
    assert stopwatch.elapsed == 0


def test_the_model_knows_a_spin_that_parts_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: after every layer the same share costs far more."""
    stopwatch = ModelStopwatch(monkeypatch)
    stage = stages(stopwatch)[0]
    cycles = round(0.2 * (KERNEL_US - OVERLAP_US) * CYCLES_A_US)

    def parted(layer: int) -> None:
        stage.launch(layer)
        torch.cuda._sleep(cycles)

    times = stopwatch.measure([stage, replace(stage, name="parted", launch=parted)], 3, 0)
    assert times["parted"].p50 / times["stage"].p50 > 2


def test_a_spin_shortened_by_its_own_launch_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the launch is in both graphs of a stage; off the spin, it is missing where it doesn't fit."""
    stopwatch = ModelStopwatch(monkeypatch)
    stage = stages(stopwatch)[0]
    launch_cycles = SPIN_OVERHEAD_US * CYCLES_A_US
    cycles_a_layer = 0.2 * (KERNEL_US - OVERLAP_US) * CYCLES_A_US

    def finish(layers: int) -> None:
        torch.cuda._sleep(round(max(0.0, cycles_a_layer * layers - launch_cycles)))

    times = stopwatch.measure([stage, replace(stage, name="shortened", finish=finish)], 3, 0)
    assert times["shortened"].p50 / times["stage"].p50 < 1.16


def outside_bounds(monkeypatch: pytest.MonkeyPatch, tries: int) -> int:
    """How many of so many slowdowns of 20 % of the short stage are outside BOUNDS, a fourth of the replays late."""
    outside = 0
    for seed in range(tries):
        stopwatch = ModelStopwatch(monkeypatch, late=0.25, seed=seed)
        plain = stages(stopwatch)[:1]
        slower = slowdown.slowed(plain, 0.2, stopwatch)
        stopwatch.late = 0.0
        before, after = (stopwatch.measure(subjects, 1, 0)["stage"].p50 for subjects in (plain, slower))
        outside += not BOUNDS[0] < after / before < BOUNDS[1]
    return outside


def test_late_replays_do_not_move_a_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outside_bounds(monkeypatch, 300) == 0


def test_late_replays_move_a_slowdown_of_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(slowdown, "SAMPLES", 15)
    assert outside_bounds(monkeypatch, 300) > 3
