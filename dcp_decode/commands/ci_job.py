"""`dcp-decode ci-job`, which `launch/ci_job.sh` starts: everything a cluster's CI should run, with one exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_decode.commands.options import FiniteRange
from dcp_decode.job.stages import INJECTIONS, NAMES, Settings

if TYPE_CHECKING:
    from dcp_decode.job.runner import Outcome

STAGES = " ".join(NAMES)


def _option(name: str, **given: Any) -> Any:
    return click.option(name, envvar=name.removeprefix("--").upper().replace("-", "_"), show_envvar=True, **given)


@click.command(name="ci-job")
@click.argument("config", default="configs/smoke.toml")
@_option(
    "--artifacts",
    type=click.Path(path_type=Path),
    default="artifacts",
    show_default=True,
    help="Folder of all it leaves.",
)
@_option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to run."
)
@_option("--stages", default=STAGES, show_default=True, help="Which of these to run.")
@_option("--soak-minutes", type=FiniteRange(min=0), default=0.3, show_default=True, help="Start no round after.")
@_option("--baselines", type=click.Path(path_type=Path), default="results/baselines", show_default=True, help="Folder.")
@_option("--inject", type=click.Choice(INJECTIONS), help="A fault: the job must then be red.")
@click.option("--nnodes", envvar="NNODES", type=click.IntRange(min=1), default=1, hidden=True)
@click.option("--node-rank", envvar="NODE_RANK", type=click.IntRange(min=0), default=0, hidden=True)
def ci_job(
    config: str,
    artifacts: Path,
    device: str,
    stages: str,
    soak_minutes: float,
    baselines: Path,
    inject: str | None,
    nnodes: int,
    node_rank: int,
) -> int:
    """Run doctor, a verified run of CONFIG under torchrun and under MPI, integration tests, a soak, and the latency
    checkpoint with its regression gate; exit with the first failing stage's code (3 also if it took too long).

    Artifacts: job.json, job.xml (JUnit), index.html, and of each stage its log and document.
    """
    from dcp_decode.errors import ConfigError
    from dcp_decode.job.report import write_report
    from dcp_decode.job.runner import Job

    wanted = stages.replace(",", " ").split()
    for name in wanted or [stages]:
        if name not in NAMES:
            raise ConfigError("--stages", name, f"must be among {', '.join(NAMES)}")
    if node_rank >= nnodes:
        raise ConfigError("NODE_RANK", node_rank, f"must be less than NNODES = {nnodes}")
    # Nodes beside the first only take part in its stages; their logs have a folder of their own.
    shared = Path(os.path.realpath(artifacts))
    folder = shared if node_rank == 0 else shared / f"node-{node_rank}"
    settings = Settings(config, folder, shared, device, baselines, soak_minutes, inject, nnodes, node_rank)
    job = Job(settings, wanted, _show)
    with job.noting_signals():  # the report, too, is not broken off
        job.run()
        path = write_report(folder, job.outcomes, job.exit_code)
        click.echo(path)
    return job.exit_code


def _show(outcome: Outcome) -> None:
    result = "skipped" if outcome.exit_code is None else f"FAILED {outcome.exit_code}" if outcome.exit_code else "ok"
    click.echo(f"{outcome.name:<11} {result:<8} {outcome.seconds:6.1f} s  {outcome.text}".rstrip())
