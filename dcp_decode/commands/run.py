"""`dcp-decode run`: verify the requests of a trace, end to end."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_decode.commands.options import (
    config_options,
    launch_options,
    metrics_options,
    prepare_launch,
    read_config,
    read_metrics,
)
from dcp_decode.config import RunConfig
from dcp_decode.errors import ConfigError
from dcp_decode.records import RankReport

if TYPE_CHECKING:
    from dcp_decode.control.plane import ControlPlane
    from dcp_decode.metrics import MetricsSettings
    from dcp_decode.step import BeforeStage


@click.command()
@config_options
@metrics_options
@click.option(
    "--output", type=click.Path(dir_okay=False), help="The JSON document; default results/run-<utc>-<pid>.json."
)
@click.option("--inject", type=click.Choice(["hang", "wrong-bit"]), help="One fault that the run must end with.")
@launch_options
def run(
    config: Path | None,
    output: str | None,
    inject: str | None,
    prepare: Path | None,
    launched_by: str,
    **options: Any,
) -> int:
    """Verify the requests of a trace over the ranks of CONFIG (default: as configs/smoke.toml).

    Starts its own ranks, or is one when torchrun or mpirun started it.
    """
    configured = read_config(config, options)
    metrics = read_metrics(options)
    if inject is not None and configured.parallel.dcp == 1:
        raise ConfigError("--inject", inject, "needs two ranks, but parallel.dcp = 1")
    if prepare is not None:  # launch/*.sh: leave the plan for `conclude`, say how many ranks to start
        return prepare_launch(prepare, "run", configured, launched_by, output)
    # torch and what builds on it load only now: a bad config is refused in a fraction of a second.
    from dcp_decode.faults import EXAMPLES, FaultInjector
    from dcp_decode.launcher import execute
    from dcp_decode.presentation import publish

    before_stage = None
    if inject is not None:
        before_stage = FaultInjector(EXAMPLES[inject], configured.model.layers, configured.parallel.route)

    def body(control: ControlPlane) -> RankReport:
        report = run_one_rank(configured, control, before_stage, metrics)
        if inject is not None:
            raise ConfigError("--inject", inject, "did not show: a run must take two steps and check the second one")
        return report

    return execute("run", configured, body, output, publish)


def run_one_rank(
    config: RunConfig,
    control: ControlPlane,
    before_stage: BeforeStage | None = None,
    metrics: MetricsSettings | None = None,
) -> RankReport:
    """One rank of a run; rank 0 shows how far it is. before_stage: fault injection. metrics: how to serve them."""
    from dcp_decode.presentation import progress_bar
    from dcp_decode.run import Progress, run_rank

    with contextlib.ExitStack() as stack:
        observers = []
        if metrics is not None:
            from dcp_decode.metrics import serve_metrics

            observers.append(stack.enter_context(serve_metrics(metrics, config, control)))
        if control.rank == 0:
            observers.append(stack.enter_context(progress_bar(config.service.max_steps)))

        def on_progress(progress: Progress) -> None:
            for observe in observers:
                observe(progress)

        return run_rank(config, control, on_progress if observers else None, before_stage).report()
