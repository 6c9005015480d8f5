"""`dcp-decode conclude`: the end of `launch/*.sh`, which outlive the ranks of torchrun and mpirun."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dcp_decode.errors import UnsupportedEnvironment

if TYPE_CHECKING:
    from dcp_decode.records import Plan
    from dcp_decode.results import Conclusion


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--patience", type=float, default=0.0, help="Seconds to wait for records that are not there yet.")
@click.option("--stopped", is_flag=True, help="A rank without a record was told to stop before it could say so.")
@click.option("--silent", is_flag=True, help="Only the exit code: another node reports.")
def conclude(folder: Path, patience: float, silent: bool, stopped: bool) -> int:
    """Write the JSON document of a run from the records in FOLDER; exit as the contract says."""
    from dcp_decode import records, results
    from dcp_decode.forensics.conclusion import keep

    try:
        plan = records.read_plan(folder)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise UnsupportedEnvironment(f"no plan of a run in {folder} ({reason})") from None
    ended = records.await_records(folder, plan.processes, patience)
    if stopped:
        ended = {rank: ended.get(rank) or records.stopped(rank) for rank in range(plan.processes)}
    conclusion = results.conclude(plan, ended)
    if silent:
        return conclusion.exit_code
    if plan.command != "doctor":
        conclusion = keep(conclusion, plan, folder)
        _publish(conclusion, plan)
    elif conclusion.error is not None:  # what the doctor found is shown already
        click.echo(f"error: {conclusion.error}", err=True)
    return conclusion.exit_code


def _publish(conclusion: Conclusion, plan: Plan) -> None:
    """As the command of the plan does at the end of its own ranks."""
    if plan.command == "checkpoint":
        from dcp_decode.checkpoint.presentation import publish as publish_checkpoint

        publish_checkpoint(conclusion, plan, None)
    else:
        from dcp_decode.presentation import publish

        publish(conclusion, plan)
