"""`make bench-cpu`: one layer of a DCP8 verify step on the CPU at the checkpoint's shape, start-up, and memory.

Eight forked ranks over shared memory, one request of 16,384 tokens, 5 verify rows, 96 heads, top-k 2048 (about 256
keys a row and rank), one layer, not verified. The targets are the project's own for two cores: a layer step in at most
0.25 s, eight ranks up in at most 2 s, memory flat over 500 steps.

After each step all ranks run a peer between barriers: the attention of as many rows, heads and keys in plain torch, no
exchange. Its time stands beside the step's in `distributions`, so that `dcp-decode compare` judges ratios: a faster or
busier machine moves both alike.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace

import click
import numpy as np
import torch

from dcp_decode import numerics
from dcp_decode.commands.run import report_of
from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.faults import FaultInjector, FaultPlan
from dcp_decode.launcher import execute
from dcp_decode.presentation import publish
from dcp_decode.records import RankReport
from dcp_decode.run import Progress, run_rank
from dcp_decode.statistics import stage_statistics

WARM_UP_STEPS = 20
BATCH, KEYS = 5, 256  # rows of a step, and the keys of a row on each of 8 ranks in the mean
PEER_REPEATS = 3  # of the peer in a round: about as long as the step's own decode
SETTINGS: dict[str, object] = {
    "model.name": "bench-cpu",
    "model.layers": 1,
    "model.topk": 2048,
    "mailbox.capacity": BATCH,
    "mailbox.deadline_seconds": 30.0,
    "cache.pages": 64,
    "service.acceptance": 0.5,
    "workload.synthetic": {"requests": 1, "input_length": 16384, "output_length": 8192},
    "verify.mode": "off",
}


@click.command()
@click.option("--steps", type=click.IntRange(WARM_UP_STEPS + 10), default=500, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False), help="The JSON document.")
@click.option("--slowdown", type=click.FloatRange(0, 10), default=0.0, help="Make the stages this share slower.")
def main(steps: int, output: str | None, slowdown: float) -> None:
    """Run the benchmark; prints the run's table and the path of its JSON document, whose `stages` hold the times."""
    config = load_config(None, SETTINGS | {"service.max_steps": steps})
    launched = time.time()
    sys.exit(
        execute("bench-cpu", config, lambda control: _measure(config, control, launched, slowdown), output, publish)
    )


def _measure(config: RunConfig, control: ControlPlane, launched: float, slowdown: float) -> RankReport:
    start_up = max(control.all_gather(time.time(), "ranks up")) - launched
    peer = TorchPeer(config.model.heads, control.rank)
    seconds: dict[str, list[float]] = {"layer_step": [], "peer:torch": []}
    resident: list[int] = []
    started = time.perf_counter()

    def on_progress(_: Progress) -> None:
        nonlocal started
        seconds["layer_step"].append(time.perf_counter() - started)
        control.barrier("before the peer")
        started = time.perf_counter()
        for _repeat in range(PEER_REPEATS):
            peer.attend()
        seconds["peer:torch"].append(time.perf_counter() - started)
        control.barrier("after the peer")
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        started = time.perf_counter()

    injector = FaultInjector(FaultPlan(slowdown=slowdown), config.model.layers, config.parallel.route)
    summary = run_rank(config, control, on_progress, injector)
    slowest = {name: np.max(control.all_gather(times, name), axis=0)[WARM_UP_STEPS:] for name, times in seconds.items()}
    growth = max(control.all_gather(resident[-1] - resident[WARM_UP_STEPS], "memory"))
    steps = slowest["layer_step"]
    if control.rank == 0:
        print(
            f"layer step           p50 {np.median(steps):.3f} s, p95 {np.percentile(steps, 95):.3f} s wall time, "
            f"{len(steps)} steps, {config.parallel.dcp} ranks\n"
            f"start-up             {start_up:.2f} s from the launch to the last rank's first line\n"
            f"memory               peak resident size of a rank grew by at most {growth} KiB over {len(steps)} steps"
        )
    report = report_of(summary)
    measured = {"layer_step": stage_statistics(steps), "start_up": stage_statistics(np.array([start_up]))}
    distribution = {
        "batch": BATCH,
        "heads": config.model.heads,
        "keys": KEYS,
        "mode": "group",
        "samples_us": {name: (times * 1e6).round(1).tolist() for name, times in slowest.items()},
    }
    return replace(report, stages=report.stages | measured, measurements={"distributions": [distribution]})


class TorchPeer:
    """Plain attention of one rank's share of a step: E4M3 rows gathered, dequantised, two products and a softmax."""

    def __init__(self, heads: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = 4096
        values = torch.randn(rows, numerics.ROW_BYTES, generator=generator)
        self.cache = numerics.quantize_e4m3(values.to(torch.bfloat16), 1 / 16)  # uint8 [N, 576]
        self.query = torch.randn(BATCH, heads, numerics.ROW_BYTES, generator=generator)
        self.rows = torch.randint(rows, (BATCH, KEYS), generator=generator)

    def attend(self) -> torch.Tensor:
        """FP32 [B, heads, 512]."""
        keys = numerics.e4m3_values(self.cache[self.rows])  # (B, keys, 576)
        weights = torch.softmax(torch.bmm(self.query, keys.transpose(1, 2)), dim=2)
        return torch.bmm(weights, keys[..., : numerics.LATENT_DIM])


if __name__ == "__main__":
    main()
