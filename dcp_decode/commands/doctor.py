"""`dcp-decode doctor`: what will work on this machine, or on every rank's machine, and why not the rest."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_decode.commands.options import config_options, launch_options, prepare_launch, read_config
from dcp_decode.config import RunConfig
from dcp_decode.errors import BAD_INPUT, VERIFIED
from dcp_decode.records import RECORDS_VARIABLE, Outcome, RankRecord, write_record

if TYPE_CHECKING:
    from dcp_decode.control.plane import ControlPlane
    from dcp_decode.doctor.verdicts import Examination
    from dcp_decode.world import Launcher

PLAIN_WIDTH = 200  # of a line when standard output is no terminal


@click.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output instead of the tables.")
@click.option(
    "--build",
    "builds",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A folder of kernels to match; repeatable.",
)
@launch_options
def doctor(
    config: Path | None,
    as_json: bool,
    builds: tuple[Path, ...],
    prepare: Path | None,
    launched_by: str,
    **options: Any,
) -> int:
    """Say whether CONFIG (default: as configs/smoke.toml) will run here, and what works on this machine.

    Under torchrun or mpirun: of all ranks, with what differs between them. Exit code 0 if CONFIG will run, else 2.
    """
    configured = read_config(config, options)
    if prepare is not None:  # launch/*.sh: as in `dcp-decode run`
        return prepare_launch(prepare, "doctor", configured, launched_by, None)
    from dcp_decode.launcher import connect, detect_launcher

    launcher = detect_launcher(os.environ)
    control = connect(launcher, configured.mailbox.control_deadline_seconds)
    examination = _examine(configured, launcher, control, builds, as_json)
    exit_code = VERIFIED if examination.ready else BAD_INPUT
    folder = os.environ.get(RECORDS_VARIABLE)
    if folder:
        outcome: Outcome = "ok" if examination.ready else "failed"
        error = None if examination.ready else _refusal(examination)
        ended = RankRecord(control.rank, os.getpid(), socket.gethostname(), outcome, exit_code, time.time(), error)
        write_record(Path(folder), ended)
    control.barrier("end of the doctor")  # a launcher ends all ranks when one leaves with an exit code
    control.close()
    return exit_code


def _examine(
    config: RunConfig, launcher: Launcher, control: ControlPlane, builds: tuple[Path, ...], as_json: bool
) -> Examination:
    """Gather the facts of all ranks and judge them; rank 0 shows the findings. Collective."""
    from rich.console import Console

    from dcp_decode.doctor import report
    from dcp_decode.doctor.facts import observe
    from dcp_decode.doctor.verdicts import examine

    first_of_host = control.rank == min(
        (rank for rank, peer in enumerate(control.peers) if peer.hostname == socket.gethostname()), default=0
    )
    ranks = control.all_gather(observe(control.rank, with_imports=first_of_host), "doctor")
    examination = examine(config, launcher, ranks, builds)
    if control.rank == 0 and as_json:
        click.echo(json.dumps(report.document(examination, ranks), indent=1))
        if not examination.ready and RECORDS_VARIABLE not in os.environ:  # else it is concluded from the records
            click.echo(f"error: {_refusal(examination)}", err=True)
    elif control.rank == 0:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        report.show(console, examination, ranks)
        sys.stdout.flush()
    return examination


def _refusal(examination: Examination) -> str:
    return f"not ready: {examination.answer}"
