"""A slowdown on purpose, to see that the regression gate finds it: a kernel that spins at the end of every graph.

A spin after every layer would cost more than it lasts: launches that overlap (programmatic dependent launch) no longer
do with a kernel between them, which made 20 % come out as 40 to 210 % on an H200. At the end it parts nothing, and as
it lasts in proportion to the graph's layers, a layer takes about that share longer: 1.17 to 1.31 x at the gate there,
with 15 rounds to calibrate it.

What the spin's own launch takes is in the short graph as in the long one, so the time of a layer is free of it. To take
it off the spin would be wrong: a short graph's spin can be shorter than its launch. What is left is noise: a replay
that its host enqueues late takes 10 to 20 us longer, as long as a whole graph of a short stage. So a stage's time is
the median of as many rounds as a measurement has: in a model where a fourth of the replays are late, with 15 rounds one
slowdown in 30 is off by half or more, with 51 one in thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dcp_decode.checkpoint.timing import Stopwatch, Subject

SPINS = (20_000, 40_000)  # cycles; their difference is free of what a launch takes
SAMPLES = 51


def slowed(subjects: Sequence[Subject], share: float, stopwatch: Stopwatch) -> list[Subject]:
    """The subjects, each slower by `share` of the time that it takes now; share 0 leaves them as they are."""
    if not share:
        return list(subjects)
    spins = [_spin_a_layer(cycles) for cycles in SPINS]
    times = stopwatch.measure([*subjects, *spins], SAMPLES, seed=0)
    short, long = (times[spin.name].p50 for spin in spins)
    cycles_a_microsecond = (SPINS[1] - SPINS[0]) / (long - short)
    return [_with_spin(subject, share * times[subject.name].p50 * cycles_a_microsecond) for subject in subjects]


def _spin_a_layer(cycles: int) -> Subject:
    return Subject(f"spin of {cycles}", lambda _layer: _spin(cycles))


def _with_spin(subject: Subject, cycles_a_layer: float) -> Subject:
    return replace(subject, finish=lambda layers: _spin(round(cycles_a_layer * layers)))


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)
