"""Latency statistics of a stage, in the form of contract section 7."""

from __future__ import annotations

import numpy as np


def stage_statistics(seconds: np.ndarray) -> dict[str, float]:
    """p50_us, p95_us, p99_us and samples of one stage's times, float seconds [iterations]; NaN if there are none."""
    if not seconds.size:
        return {"p50_us": float("nan"), "p95_us": float("nan"), "p99_us": float("nan"), "samples": 0}
    p50, p95, p99 = (float(value) for value in np.percentile(seconds * 1e6, (50, 95, 99)))
    return {"p50_us": p50, "p95_us": p95, "p99_us": p99, "samples": int(seconds.size)}
