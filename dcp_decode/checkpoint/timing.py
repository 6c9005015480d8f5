"""Times work that lasts microseconds: CUDA graphs of many layers, replayed in an interleaved order.

A subject is anything that can enqueue its layer i. It is captured twice, as a short and a long chain of layers, and
every round replays every graph once, in a random order, so that clocks, temperature and neighbours change for all
alike. Events stand around one replay; a spinning kernel ahead keeps the GPU busy until the host has enqueued it all, so
no launch latency of the host is inside.

    layer time of a round = (long replay - median short replay) / (long layers - short layers)

That leaves the launch of the graph out. A sample is therefore the mean of the layers of one replay: its percentiles
show how replays differ, not single kernels. The long graph as a whole, launch included, is a model step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dcp_decode.statistics import stage_statistics

LEAD_CYCLES = 200_000  # about 0.1 ms: the host enqueues what prepares a replay, and the replay, meanwhile
WARM_UP_ROUNDS = 3
SHORT_PART = 4  # the short graph has a fourth of the long one's layers


@dataclass(frozen=True)
class Subject:
    """What is timed. launch: enqueue layer i. finish: enqueue what ends a graph of so many layers (timed with them).

    prepare: enqueue what must be in place before layers run (not timed). All enqueue on the current stream. layers: of
    the long graph; None: the stopwatch's.
    """

    name: str
    launch: Callable[[int], None]
    prepare: Callable[[], None] = lambda: None
    layers: int | None = None
    finish: Callable[[int], None] = lambda layers: None


@dataclass(frozen=True)
class Series:
    """Microseconds by round: of a layer (mean of a replay's), and of the whole long graph."""

    layer: np.ndarray
    step: np.ndarray

    @property
    def p50(self) -> float:
        return float(np.median(self.layer))

    def statistics(self) -> dict[str, float]:
        """In the form of contract section 7."""
        return stage_statistics(self.layer * 1e-6)

    def rounds(self) -> list[float]:
        """Of a layer; below a nanosecond an event resolves nothing."""
        return [round(float(value), 3) for value in self.layer]


def graph_lengths(layers: int) -> tuple[int, int]:
    """Layers of the short and of the long graph (at least two)."""
    return max(1, layers // SHORT_PART), layers


def layer_series(short: np.ndarray, long: np.ndarray, lengths: tuple[int, int]) -> Series:
    """Microseconds of whole replays [rounds] of both graphs, of `lengths` layers, as a `Series`."""
    return Series((long - np.median(short)) / (lengths[1] - lengths[0]), long)


def slowest_rank(by_rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(maximum, spread) over ranks of microseconds [ranks, rounds]."""
    return by_rank.max(0), by_rank.max(0) - by_rank.min(0)


class Stopwatch:
    """Graphs of `layers` layers, and of a fourth of that, on one stream of the current CUDA device."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.stream = torch.cuda.Stream()

    def measure(self, subjects: Sequence[Subject], samples: int, seed: int) -> dict[str, Series]:
        """Series by subject name. seed: of the order in which a round replays."""
        replays = [
            (subject, self._capture(subject, length), which)
            for subject in subjects
            for which, length in enumerate(graph_lengths(subject.layers or self.layers))
        ]
        times = {subject.name: np.empty((2, samples)) for subject in subjects}
        order = random.Random(seed)
        for sample in range(-WARM_UP_ROUNDS, samples):
            order.shuffle(replays)
            events = [
                (subject.name, which, *replay(graph, subject.prepare, self.stream)) for subject, graph, which in replays
            ]
            self.stream.synchronize()
            if sample >= 0:
                for name, which, begin, end in events:
                    times[name][which, sample] = begin.elapsed_time(end) * 1e3

        def series(subject: Subject) -> Series:
            short, long = times[subject.name]
            return layer_series(short, long, graph_lengths(subject.layers or self.layers))

        return {subject.name: series(subject) for subject in subjects}

    def _capture(self, subject: Subject, length: int) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.stream):
            subject.prepare()
        return capture(subject.launch, length, self.stream, subject.finish)


def capture(
    launch: Callable[[int], None],
    length: int,
    stream: torch.cuda.Stream,
    finish: Callable[[int], None] = lambda layers: None,
    wait: Callable[[torch.cuda.Stream], None] = torch.cuda.Stream.synchronize,
) -> torch.cuda.CUDAGraph:
    """A graph of layers 0 .. length - 1, after one eager layer: modules load and libraries allocate in that one.

    wait: for that layer.
    """
    with torch.cuda.stream(stream):
        launch(0)
    wait(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(length):
            launch(layer)
        finish(length)
    return graph


def replay(
    graph: torch.cuda.CUDAGraph,
    prepare: Callable[[], None],
    stream: torch.cuda.Stream,
    lead_cycles: int = LEAD_CYCLES,
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Enqueue `prepare` and the graph; the events around the graph alone, to be read after a synchronisation."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(lead_cycles)
        prepare()
        begin.record(stream)
        graph.replay()
        end.record(stream)
    return begin, end
