"""`dcp-decode checkpoint`: what one layer takes at the latency checkpoint, beside its peers and its floors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dcp_decode.commands.options import FiniteRange, launch_options, prepare_launch
from dcp_decode.config import RunConfig, load_config
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.results import require_writable_file

if TYPE_CHECKING:
    from dcp_decode.control.plane import ControlPlane
    from dcp_decode.records import RankReport

LATENCY_CHECKPOINT = Path(__file__).resolve().parent.parent.parent / "configs" / "latency_checkpoint.toml"


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--mode", type=str, default=None, help="Overrides checkpoint.mode: solo, loopback or group.")
@click.option("--dcp", type=int, default=None, help="Overrides parallel.dcp.")
@click.option("--fabric", type=str, default=None, help="Overrides parallel.fabric, of mode group.")
@click.option("--samples", type=int, default=None, help="Overrides checkpoint.samples.")
@click.option("--quick", is_flag=True, help="Only the model's own point, with Triton as the one peer.")
@click.option(
    "--output", type=click.Path(dir_okay=False), help="The JSON document; default results/checkpoint-<gpu>-<utc>.json."
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="The HTML report; default beside the document."
)
@click.option(
    "--render", type=click.Path(path_type=Path), help="Measure nothing: write the HTML report of this document."
)
@click.option("--slowdown", type=FiniteRange(min=0), default=0.0, hidden=True)
@launch_options
def checkpoint(
    config: Path | None,
    mode: str | None,
    dcp: int | None,
    fabric: str | None,
    samples: int | None,
    quick: bool,
    output: str | None,
    html: Path | None,
    render: Path | None,
    slowdown: float,
    prepare: Path | None,
    launched_by: str,
) -> int:
    """Measure CONFIG (default: configs/latency_checkpoint.toml) on a GPU; write a JSON document and an HTML report.

    Modes solo and loopback use one GPU and start without a launcher; group needs a GPU a rank, and starts its own
    ranks or is one that torchrun or mpirun started.
    """
    if render is not None:
        return _render(render, html)
    overrides = {
        "checkpoint.mode": mode,
        "parallel.dcp": dcp,
        "parallel.fabric": fabric,
        "checkpoint.samples": samples,
    }
    configured = _place(
        config or LATENCY_CHECKPOINT, {key: value for key, value in overrides.items() if value is not None}
    )
    if html is not None:
        require_writable_file("--html", html)
    if slowdown and configured.checkpoint.mode == "group":
        raise ConfigError("--slowdown", slowdown, "needs checkpoint.mode = solo or loopback, not group")
    if prepare is not None:  # launch/*.sh: leave the plan for `conclude`, say how many ranks to start
        return _prepare(prepare, configured, launched_by, output)
    from dcp_decode.checkpoint.presentation import publish
    from dcp_decode.launcher import execute

    body = partial(_run_rank, configured, quick, slowdown)
    return execute("checkpoint", configured, body, output, partial(publish, html=html))


def _place(path: Path, overrides: dict[str, object]) -> RunConfig:
    """The config for its mode: on GPUs, all in one process unless real ranks are to be measured."""
    configured = load_config(path, overrides)
    placed: dict[str, object] = {"parallel.device": "cuda"}
    if configured.checkpoint.mode != "group":
        placed["parallel.fabric"] = "loopback"
    return load_config(path, overrides | placed)


def _prepare(folder: Path, config: RunConfig, launched_by: str, output: str | None) -> int:
    mode = config.checkpoint.mode
    if mode != "group":
        raise UnsupportedEnvironment(f"checkpoint.mode = {mode!r} runs in one process: start it without {launched_by}")
    return prepare_launch(folder, "checkpoint", config, launched_by, output)


def _run_rank(config: RunConfig, quick: bool, slowdown: float, control: ControlPlane) -> RankReport:
    from dcp_decode.checkpoint.rank import run_group_rank, run_single_process

    if config.checkpoint.mode == "group":
        return run_group_rank(config, quick, control)
    return run_single_process(config, quick, slowdown, control)


def _render(document: Path, html: Path | None) -> int:
    import json

    from dcp_decode.checkpoint.presentation import UNREADABLE, render
    from dcp_decode.inputs import read_input

    try:
        content = json.loads(read_input(document))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("--render", str(document), f"must be a checkpoint's JSON document ({error})") from None
    if not isinstance(content, dict) or not content.get("points") or content.get("command") != "checkpoint":
        raise ConfigError("--render", str(document), "must be a checkpoint's JSON document with points")
    try:
        render(document, content, html)
    except UNREADABLE as error:
        what = f"must be a document of this version ({type(error).__name__}: {error})"
        raise ConfigError("--render", str(document), what) from None
    return 0
