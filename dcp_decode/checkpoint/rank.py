"""One process of a checkpoint: the GPU it is on, what it measures, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dcp_decode.checkpoint import summary
from dcp_decode.checkpoint.progress import progress_lines
from dcp_decode.config import RunConfig
from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.fabric.placement import Placement, open_fabric, place
from dcp_decode.records import RankReport

if TYPE_CHECKING:
    from dcp_decode.checkpoint.measure import Measurements


def run_single_process(config: RunConfig, quick: bool, slowdown: float, control: ControlPlane) -> RankReport:
    """Modes solo and loopback. Raises UnsupportedEnvironment without a GPU, WrongResult if a gate is not passed."""
    placement = place("loopback", "cuda", control)
    torch.cuda.set_device(placement.device)
    from dcp_decode.checkpoint.measure import Checkpoint  # needs cutlass

    with progress_lines() as on_progress:
        measured = Checkpoint(config, quick, slowdown).run(on_progress)
    return report_of(placement, config, measured)


def run_group_rank(config: RunConfig, quick: bool, control: ControlPlane) -> RankReport:
    """Mode group, one rank of it. Raises UnsupportedEnvironment where ranks would share a GPU, ConfigError."""
    if config.parallel.route != "push":
        raise ConfigError("parallel.route", config.parallel.route, "must be push with checkpoint.mode = 'group'")
    placement = place(config.parallel.fabric, "cuda", control)
    refuse_shared_gpu(placement, config.parallel.dcp)
    torch.cuda.set_device(placement.device)
    from dcp_decode.checkpoint.group import GroupCheckpoint

    fabric = open_fabric(placement, config.parallel.dcp, control)
    try:
        with progress_lines(shown=control.rank == 0) as on_progress:
            measured = GroupCheckpoint(config, quick, control, fabric).run(on_progress)
    except BaseException:
        fabric.abandon()
        raise
    fabric.close()
    return report_of(placement, config, measured)


def refuse_shared_gpu(placement: Placement, dcp: int) -> None:
    """Raise UnsupportedEnvironment unless every rank has a GPU of its own: time-sliced ranks time the scheduler."""
    if placement.fabric == "loopback" or placement.shared:
        raise UnsupportedEnvironment(
            f"checkpoint.mode = 'group' needs {dcp} GPUs, one a rank, but ranks would share one here "
            f"(fabric {placement.fabric}); on one GPU use --mode solo or --mode loopback"
        )


def report_of(placement: Placement, config: RunConfig, measured: Measurements) -> RankReport:
    """The figures of contract section 7; the checkpoint's own keys stay beside them.

    stages: of the own point with its keys in L2, none if that has failed. A failed checkpoint's worst (row, head) is
    that of its first failure.
    """
    passed, wrong, keys = measured.passed, measured.wrong, measured.keys
    own = summary.own_points({"config": config.model_dump(), "points": keys["points"]}).get("hot")
    stages = {} if own is None else own["stages"]
    return RankReport(
        fabric=placement.fabric,
        device="cuda",
        family=measured.family,
        verified=wrong is None,
        error=None if wrong is None else str(wrong),
        worst_error=passed.worst.error if wrong is None else wrong.error,
        error_bound=passed.worst.bound if wrong is None else wrong.bound,
        worst_row=None if wrong is None else wrong.place,
        checked_steps=len(keys["points"]),
        digest=passed.digest,
        requests={},
        refusals=[],
        steps=0,
        tokens=0,
        acceptance=[],
        stages={name: {key: of for key, of in stage.items() if key != "rounds_us"} for name, stage in stages.items()},
        fabric_reason=placement.reason,
        measurements=keys,
    )
