"""`dcp-decode build`: the kernels of a config as libraries, for machines that have no compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dcp_decode.commands.options import config_overrides, read_config
from dcp_decode.errors import ConfigError


@click.command()
@click.option("--arch", required=True, help="Comma-separated: sm_90a, sm_100a, sm_103a.")
@click.option("--config", type=click.Path(path_type=Path), help="Default: as configs/smoke.toml.")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option("--batches", help="Comma-separated verify rows; default: all that a run of the config can need.")
@config_overrides
def build(arch: str, config: Path | None, output: Path, batches: str | None, **options: Any) -> int:
    """Build the kernels of a config ahead of time; `run --kernels OUTPUT` needs neither cutlass nor a compiler.

    Prints the manifest's path.
    """
    configured = read_config(config, options)
    # What builds on torch loads only now: a bad config is refused in a fraction of a second.
    from dcp_decode.device_rank import step_batches
    from dcp_decode.kernels import build as builder
    from dcp_decode.kernels.aot import MANIFEST

    geometry, push = configured.geometry(), configured.parallel.route == "push"
    rows = step_batches(configured.service.draft_tokens + 1, geometry) if batches is None else _parse(batches)
    builder.build(geometry, push, rows, arch.split(","), output)
    click.echo(output / MANIFEST)
    return 0


def _parse(batches: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(batch) for batch in batches.split(",")}))
    except ValueError:
        raise ConfigError("--batches", batches, "must be whole numbers with commas between them") from None
