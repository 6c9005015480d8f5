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
LAYERS = 24


class ModelStopwatch:
    """A GPU on which a kernel takes KERNEL_US, or OVERLAP_US less behind another one, and a spin what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.elapsed, self.overlaps = 0.0, False
        monkeypatch.setattr(torch.cuda, "_sleep", self.spin)

    def kernel(self, times: float = 1.0) -> None:
        self.elapsed += times * KERNEL_US - OVERLAP_US * self.overlaps
        self.overlaps = True

    def spin(self, cycles: int) -> None:
        assert isinstance(cycles, int)
        self.elapsed += SPIN_OVERHEAD_US + cycles / CYCLES_A_US
        self.overlaps = False

    def measure(self, subjects: Sequence[Subject], samples: int, seed: int) -> dict[str, Series]:
        series = {}
        for subject in subjects:
            lengths = graph_lengths(subject.layers or LAYERS)
            short, long = (self._replay(subject, length) for length in lengths)
            series[subject.name] = layer_series(np.full(samples, short), np.full(samples, long), lengths)
        return series

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


@pytest.mark.parametrize("share", [0.2, 1.5])
def test_a_layer_takes_just_its_share_longer(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = ModelStopwatch(monkeypatch)
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
