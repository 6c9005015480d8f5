"""`make bench-cpu`: one layer of a DCP8 verify step on the CPU at the checkpoint's shape, start-up, and memory.

Eight forked ranks over shared memory, one request of 16,384 tokens, 5 verify rows, 96 heads, top-k 2048 (about 256
keys a row and rank), one layer, not verified. The targets are the project's own for two cores: a layer step in at most
0.25 s, eight ranks up in at most 2 s, memory flat over 500 steps (`results/bench-cpu.json`: 0.19 s, 0.05 s).

After each step all ranks run a peer between barriers: the attention of as many rows, heads and keys in plain torch, no
exchange. `distributions` holds the CPU time of both, a rank's mean, so that `dcp-decode compare` judges their ratio: a
faster or busier machine moves both alike. Wall times would not do: with two to ten other processes wanting the same two
cores, the ratio of wall times ran from 2.04 to 2.52 (of CPU times from 2.13 to 2.34, with a peer half as long).
"""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from dataclasses import replace

import click
import numpy as np
import torch

from dcp_decode import numerics
from dcp_decode.commands.options import FiniteRange
from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.launcher import execute
from dcp_decode.presentation import publish
from dcp_decode.records import RankReport
from dcp_decode.run import Progress, run_rank
from dcp_decode.statistics import stage_statistics

WARM_UP_STEPS = 20
BATCH, KEYS = 5, 256  # rows of a step, and the keys of a row on each of 8 ranks in the mean
PEER_REPEATS = 6  # of the peer in a round: about the CPU time of a layer step
PEER_ROWS = 4096  # that the peer chooses from: as many as the rank's cache has
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
@click.option("--slowdown", type=FiniteRange(0, 10), default=0.0, help="Make a layer step this share slower.")
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
    clock = Clock()
    resident: list[int] = []

    def on_progress(_: Progress) -> None:
        clock.extend(slowdown)
        clock.stop("layer_step")
        control.barrier("before the peer")
        clock.start()
        peer.attend()
        clock.stop("peer:torch")
        control.barrier("after the peer")
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        clock.start()

    clock.start()
    summary = run_rank(config, control, on_progress)
    steps = np.max(control.all_gather(clock.wall["layer_step"], "wall times"), axis=0)[WARM_UP_STEPS:]
    computed = {
        name: np.mean(control.all_gather(times, f"CPU times of {name}"), axis=0)[WARM_UP_STEPS:]
        for name, times in clock.cpu.items()
    }
    growth = max(control.all_gather(resident[-1] - resident[WARM_UP_STEPS], "memory"))
    if control.rank == 0:
        print(
            f"layer step           p50 {np.median(steps):.3f} s, p95 {np.percentile(steps, 95):.3f} s wall time, "
            f"{len(steps)} steps, {config.parallel.dcp} ranks\n"
            f"start-up             {start_up:.2f} s from the launch to the last rank's first line\n"
            f"memory               peak resident size of a rank grew by at most {growth} KiB over {len(steps)} steps"
        )
    report = summary.report()
    measured = {"layer_step": stage_statistics(steps), "start_up": stage_statistics(np.array([start_up]))}
    distribution = {
        "batch": BATCH,
        "heads": config.model.heads,
        "keys": KEYS,
        "mode": "group",
        "samples_us": {name: (times * 1e6).round(1).tolist() for name, times in computed.items()},
    }
    return replace(report, stages=report.stages | measured, measurements={"distributions": [distribution]})


class Clock:
    """Wall and CPU seconds of one process between `start` and `stop`, by name."""

    def __init__(self) -> None:
        self.wall: defaultdict[str, list[float]] = defaultdict(list)
        self.cpu: defaultdict[str, list[float]] = defaultdict(list)
        self._started = (0.0, 0.0)

    def start(self) -> None:
        self._started = (time.perf_counter(), time.process_time())

    def extend(self, share: float) -> None:
        """Compute for a share of the CPU time since the start: a slowdown, to see that the gate finds it."""
        now = time.process_time()
        until = now + share * (now - self._started[1])
        while time.process_time() < until:
            pass

    def stop(self, name: str) -> None:
        wall, cpu = self._started
        self.wall[name].append(time.perf_counter() - wall)
        self.cpu[name].append(time.process_time() - cpu)


class TorchPeer:
    """Plain attention of one rank's share of a step: E4M3 rows gathered, dequantised, two products and a softmax."""

    def __init__(self, heads: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(PEER_ROWS, numerics.ROW_BYTES, generator=generator)
        self.cache = numerics.quantize_e4m3(values.to(torch.bfloat16), 1 / 16)  # uint8 [N, 576]
        self.query = torch.randn(BATCH, heads, numerics.ROW_BYTES, generator=generator)
        self.rows = [torch.randint(PEER_ROWS, (BATCH, KEYS), generator=generator) for _ in range(PEER_REPEATS)]

    def attend(self) -> None:
        """PEER_REPEATS times other rows; each result is FP32 [B, heads, 512]."""
        for rows in self.rows:
            keys = numerics.e4m3_values(self.cache[rows])  # (B, keys, 576)
            weights = torch.softmax(torch.bmm(self.query, keys.transpose(1, 2)), dim=2)
            torch.bmm(weights, keys[..., : numerics.LATENT_DIM])


if __name__ == "__main__":
    main()
