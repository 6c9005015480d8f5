"""`dcp-decode conclude`: the end of `launch/*.sh`, which outlive the ranks of torchrun and mpirun."""

from __future__ import annotations

from pathlib import Path

import click

from dcp_decode.errors import UnsupportedEnvironment


@click.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--patience", type=float, default=0.0, help="Seconds to wait for records that are not there yet.")
@click.option("--silent", is_flag=True, help="Only the exit code: another node reports.")
def conclude(folder: Path, patience: float, silent: bool) -> int:
    """Write the JSON document of a run from the records in FOLDER; exit as the contract says."""
    from dcp_decode import presentation, records, results
    from dcp_decode.forensics.conclusion import keep

    try:
        plan = records.read_plan(folder)
    except OSError as error:
        raise UnsupportedEnvironment(f"no plan of a run in {folder} ({error.strerror})") from None
    conclusion = results.conclude(plan, records.await_records(folder, plan.processes, patience))
    if silent:
        return conclusion.exit_code
    if plan.command != "doctor":
        conclusion = keep(conclusion, plan, folder)
        presentation.publish(conclusion, plan)
    elif conclusion.error is not None:  # what the doctor found is shown already
        click.echo(f"error: {conclusion.error}", err=True)
    return conclusion.exit_code
