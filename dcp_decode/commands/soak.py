"""`dcp-decode soak`: the same run again and again under delays and stops of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_decode.commands.options import FiniteRange, config_options, metrics_options, read_config, read_metrics

if TYPE_CHECKING:
    from dcp_decode.config import RunConfig
    from dcp_decode.control.plane import ControlPlane
    from dcp_decode.faults import FaultPlan
    from dcp_decode.metrics import MetricsSettings
    from dcp_decode.rank_process import Body
    from dcp_decode.records import RankReport
    from dcp_decode.soak import Round


@click.command()
@config_options
@metrics_options
@click.option("--minutes", type=FiniteRange(min=0), default=1.0, show_default=True, help="Start no round after.")
@click.option("--faults", default="delays,stops", show_default=True, help="Comma-separated: delays, stops.")
@click.option(
    "--output", type=click.Path(dir_okay=False), help="The JSON document; default results/run-<utc>-<pid>.json."
)
def soak(config: Path | None, minutes: float, faults: str, output: str | None, **options: Any) -> int:
    """Run CONFIG undisturbed, then under injected faults for as long as asked: every digest must be the same.

    Starts its own ranks. A round is one run of the config, service.max_steps steps.
    """
    import os

    from dcp_decode import soak as rounds
    from dcp_decode.errors import UnsupportedEnvironment
    from dcp_decode.launcher import detect_launcher
    from dcp_decode.presentation import publish
    from dcp_decode.records import make_plan
    from dcp_decode.results import require_writable

    configured = read_config(config, options)
    metrics = read_metrics(options)
    kinds = rounds.parse_kinds(faults)
    launcher = detect_launcher(os.environ)
    if launcher.name != "builtin":
        raise UnsupportedEnvironment(f"soak starts its own ranks: start it without {launcher.name}")
    require_writable(output)
    plan = make_plan("soak", configured, launcher.name, output)

    def make_body(fault_plan: FaultPlan, folder: Path) -> Body:
        return lambda control: _run_rank(configured, fault_plan, folder, control, metrics)

    conclusion = rounds.soak(plan, configured, kinds, 60 * minutes, make_body, _show)
    publish(conclusion, plan)
    return conclusion.exit_code


def _run_rank(
    config: RunConfig, plan: FaultPlan, folder: Path, control: ControlPlane, metrics: MetricsSettings | None
) -> RankReport:
    from dcp_decode.commands.run import run_one_rank
    from dcp_decode.faults import FaultInjector
    from dcp_decode.soak import write_counts

    injector = FaultInjector(plan, config.model.layers, config.parallel.route)
    try:
        return run_one_rank(config, control, injector, metrics)
    finally:
        write_counts(folder, control.rank, injector.counts)


def _show(latest: Round) -> None:
    injected = f"{latest.faults.delays} delays, {latest.faults.stops} stops" if latest.number else "undisturbed"
    digest = (latest.digest or "none")[:16]
    click.echo(f"round {latest.number}: {latest.seconds:.1f} s, {injected}, digest {digest}", err=True)
