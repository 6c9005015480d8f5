"""Command-line options that override config keys: declared once, for every command that takes a config."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dcp_decode.config import RunConfig, load_config
from dcp_decode.errors import VERIFIED, ConfigError
from dcp_decode.records import make_plan, write_plan
from dcp_decode.results import require_writable
from dcp_decode.world import Launcher, check_world

if TYPE_CHECKING:
    from dcp_decode.metrics import MetricsSettings


class FiniteRange(click.FloatRange):
    """A range of numbers that neither NaN, which compares as if inside, nor an infinity is in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


Command = TypeVar("Command", bound=Callable[..., Any])

# option -> (config key, type). Ranges and choices are the config's own rules, with its own errors.
OVERRIDES: dict[str, tuple[str, type]] = {
    "--trace": ("workload.trace", str),
    "--requests": ("workload.requests", int),
    "--seed": ("workload.seed", int),
    "--max-steps": ("service.max_steps", int),
    "--layers": ("model.layers", int),
    "--verify": ("verify.mode", str),
    "--dcp": ("parallel.dcp", int),
    "--fabric": ("parallel.fabric", str),
    "--route": ("parallel.route", str),
    "--device": ("parallel.device", str),
    "--kernels": ("parallel.kernels", str),
    "--execution": ("parallel.execution", str),
    "--interleave": ("parallel.interleave", int),
    "--generations": ("mailbox.generations", int),
    "--pages": ("cache.pages", int),
    "--deadline": ("mailbox.deadline_seconds", float),
}


def config_options(command: Command) -> Command:
    """The argument CONFIG and one option for each override."""
    return click.argument("config", required=False, type=click.Path(path_type=Path))(config_overrides(command))


def config_overrides(command: Command) -> Command:
    """One option for each override."""
    for option, (key, kind) in reversed(OVERRIDES.items()):
        command = click.option(option, _name(option), type=kind, default=None, help=f"Overrides {key}.")(command)
    return command


def launch_options(command: Command) -> Command:
    """The hidden options of the scripts in launch/, whose values `prepare_launch` takes: prepare, launched_by."""
    launcher = click.option("--launcher", "launched_by", type=str, default="builtin", hidden=True)
    return click.option("--prepare", type=click.Path(file_okay=False, path_type=Path), hidden=True)(launcher(command))


def metrics_options(command: Command) -> Command:
    """The options of `read_metrics`."""
    for option in (
        click.option("--metrics-port", type=click.IntRange(1, 65_535), help="Rank r serves /metrics on port + r."),
        click.option("--metrics-address", default="127.0.0.1", show_default=True, help="The address to bind to."),
        click.option(
            "--stalled-after",
            type=FiniteRange(min=0, min_open=True),
            default=120.0,
            show_default=True,
            help="Seconds without a finished step after which /healthz says 503.",
        ),
    ):
        command = option(command)
    return command


def read_metrics(options: dict[str, Any]) -> MetricsSettings | None:
    """What was asked of the metrics server of the command that is being run, or None. Raises ConfigError."""
    if options["metrics_port"] is None:
        context = click.get_current_context()
        for option in ("--metrics-address", "--stalled-after"):
            name = _name(option)
            if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                raise ConfigError(option, options[name], "needs --metrics-port, without which nothing is served")
        return None
    from dcp_decode.metrics import MetricsSettings  # imports prometheus_client

    address = options["metrics_address"]
    if not address or not address.isascii():  # empty would be all addresses of this host
        raise ConfigError("--metrics-address", address, "must be a host name or an IPv4 address in ASCII")
    return MetricsSettings(options["metrics_port"], address, options["stalled_after"])


def prepare_launch(folder: Path, command: str, config: RunConfig, launcher: str, output: str | None) -> int:
    """What `--prepare` does for `launch/*.sh`: leave the plan for `conclude`, say how many ranks to start."""
    if command != "doctor":  # which says itself what will not run
        check_world(Launcher(launcher, 0, config.parallel.dcp), config)
        if os.environ.get("NODE_RANK", "0") == "0":  # the node that writes the document
            require_writable(output)
    write_plan(folder, make_plan(command, config, launcher, output))
    click.echo(config.parallel.dcp)
    return VERIFIED


def read_config(config: Path | None, options: dict[str, Any]) -> RunConfig:
    """The config file (None: the embedded default) with the options given. Raises ConfigError."""
    given = {key: options[_name(option)] for option, (key, _) in OVERRIDES.items()}
    return load_config(config, {key: value for key, value in given.items() if value is not None})


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
