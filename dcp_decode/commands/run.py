"""`dcp-decode run`: verify the requests of a trace, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_decode.commands.options import config_options, read_config
from dcp_decode.config import RunConfig

if TYPE_CHECKING:
    from dcp_decode.control.plane import ControlPlane
    from dcp_decode.records import RankReport


@click.command()
@config_options
@click.option(
    "--output", type=click.Path(dir_okay=False), help="The JSON document; default results/run-<utc>-<pid>.json."
)
@click.option("--prepare", type=click.Path(file_okay=False, path_type=Path), hidden=True)
@click.option("--launcher", type=str, default="builtin", hidden=True)
def run(config: Path | None, output: str | None, prepare: Path | None, launcher: str, **options: Any) -> int:
    """Verify the requests of a trace over the ranks of CONFIG (default: as configs/smoke.toml).

    Starts its own ranks, or is one when torchrun or mpirun started it.
    """
    configured = read_config(config, options)
    # torch and what builds on it load only now: a bad config is refused in a fraction of a second.
    from dcp_decode.launcher import execute, make_plan
    from dcp_decode.presentation import publish

    if prepare is not None:  # launch/*.sh: leave the plan for `conclude`, say how many ranks to start
        from dcp_decode.records import write_plan

        plan = make_plan("run", configured, launcher, output)
        write_plan(prepare, plan)
        click.echo(configured.parallel.dcp)
        return 0
    return execute("run", configured, lambda control: _run_rank(configured, control), output, publish)


def _run_rank(config: RunConfig, control: ControlPlane) -> RankReport:
    from dcp_decode.presentation import progress_bar
    from dcp_decode.run import run_rank

    if control.rank != 0:
        return run_rank(config, control, lambda _: None)
    with progress_bar(config.service.max_steps) as show:
        return run_rank(config, control, show)
