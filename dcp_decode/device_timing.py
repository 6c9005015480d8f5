"""Times of a step's stages on a GPU: event nodes in a captured graph, around every timed stage of every local rank.

    begin --query push of rank 0--> mark --of rank 1--> mark ... end        a mark is an event record node

Eager launches would time the host instead: a stage takes a few microseconds, its launch more. A mark between two
kernels also keeps the second from starting early (programmatic dependent launch), so the graph that is timed is not
the one that is served: it is captured and replayed apart, after the run. What two marks with nothing between them take
is measured by the same graph, and left in the times.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from dcp_decode.step import TIMED_AS, LayerRun, timed_seconds


class StageClock:
    """Hooks of `step.verify_layer` while a graph is captured; then the times of the newest replay."""

    def __init__(self) -> None:
        # An event, and what begins there: (layer, rank, stage's name), or None where nothing timed does.
        self._marks: list[tuple[torch.cuda.Event, tuple[int, int, str] | None]] = []

    def begin(self) -> None:
        """Two marks with nothing between them; before the first stage."""
        self._mark(None)
        self._mark(None)

    def before_stage(self, run: LayerRun[Any], name: str) -> None:
        if name in TIMED_AS:
            self._mark((run.layer, run.rank, name))

    def after_stage(self, name: str) -> None:
        if name in TIMED_AS:
            self._mark(None)

    def empty_seconds(self) -> float:
        """Time between two marks with nothing between them, in the newest replay."""
        return self._between(0)

    def seconds(self) -> list[tuple[int, tuple[float, ...]]]:
        """(rank, a time for each of `step.TIMED`) of every layer and local rank, in the newest replay."""
        layers: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
        for index, (_, started) in enumerate(self._marks):
            if started is not None:
                layer, rank, name = started
                layers[layer, rank][name] = self._between(index)
        return [(rank, timed_seconds(stages)) for (_, rank), stages in layers.items()]

    def _between(self, index: int) -> float:
        return self._marks[index][0].elapsed_time(self._marks[index + 1][0]) * 1e-3

    def _mark(self, started: tuple[int, int, str] | None) -> None:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._marks.append((event, started))
