"""`make bench-cpu`: one layer of a DCP8 verify step on the CPU at the checkpoint's shape, start-up, and memory.

Eight forked ranks over shared memory, one request of 16,384 tokens, 5 verify rows, 96 heads, top-k 2048 (about 256
keys a row and rank), one layer, not verified. The targets are the project's own for two cores: a layer step in at most
0.25 s, eight ranks up in at most 2 s, memory flat over 500 steps.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace

import numpy as np

from dcp_decode.commands.run import report_of
from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.launcher import execute
from dcp_decode.presentation import publish
from dcp_decode.records import RankReport
from dcp_decode.run import Progress, run_rank
from dcp_decode.statistics import stage_statistics

STEPS = 500
WARM_UP_STEPS = 20
SETTINGS: dict[str, object] = {
    "model.name": "bench-cpu",
    "model.layers": 1,
    "model.topk": 2048,
    "mailbox.capacity": 5,
    "mailbox.deadline_seconds": 30.0,
    "cache.pages": 64,
    "service.acceptance": 0.5,
    "service.max_steps": STEPS,
    "workload.synthetic": {"requests": 1, "input_length": 16384, "output_length": 8192},
    "verify.mode": "off",
}


def main() -> int:
    """Run the benchmark; prints the run's table and the path of its JSON document, whose `stages` hold the times."""
    config = load_config(None, SETTINGS)
    launched = time.time()
    return execute("bench-cpu", config, lambda control: _measure(config, control, launched), None, publish)


def _measure(config: RunConfig, control: ControlPlane, launched: float) -> RankReport:
    start_up = max(control.all_gather(time.time(), "ranks up")) - launched
    ended: list[float] = []
    resident: list[int] = []

    def on_progress(_: Progress) -> None:
        ended.append(time.perf_counter())
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    report = report_of(run_rank(config, control, on_progress))
    steps = np.diff(np.array(ended))[WARM_UP_STEPS:]
    growth = max(control.all_gather(resident[-1] - resident[WARM_UP_STEPS], "memory"))
    if control.rank == 0:
        print(
            f"layer step           p50 {np.median(steps):.3f} s, p95 {np.percentile(steps, 95):.3f} s wall time, "
            f"{len(steps)} steps, {config.parallel.dcp} ranks\n"
            f"start-up             {start_up:.2f} s from the launch to the last rank's first line\n"
            f"memory               peak resident size of a rank grew by at most {growth} KiB over {len(steps)} steps"
        )
    measured = {"layer_step": stage_statistics(steps), "start_up": stage_statistics(np.array([start_up]))}
    return replace(report, stages=report.stages | measured)


if __name__ == "__main__":
    sys.exit(main())
