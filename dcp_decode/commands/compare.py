"""`dcp-decode compare`: the regression gate over two JSON documents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_decode.commands.options import FiniteRange
from dcp_decode.errors import VERIFIED, WRONG_RESULT

if TYPE_CHECKING:
    from dcp_decode.regression.compare import Comparison

File = click.Path(path_type=Path)


@click.command()
@click.argument("base", type=File)
@click.argument("new", type=File)
@click.option(
    "--limit",
    type=FiniteRange(min=1.0, max=100.0),
    default=1.05,
    show_default=True,
    help="The largest allowed ratio of new to base.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False), help="The JSON document; default results/run-<utc>-<pid>.json."
)
def compare(base: Path, new: Path, limit: float, output: str | None) -> int:
    """Is NEW slower than BASE by more than the limit, beyond the noise of both?

    Exit code 1 if so, 2 if the two can't be compared.
    """
    import time

    from dcp_decode.regression.compare import compare_files
    from dcp_decode.results import require_writable, write_document

    require_writable(output)
    comparison = compare_files(base, new, limit)
    exit_code = WRONG_RESULT if comparison.of_verdict("slower") else VERIFIED
    _show(comparison)
    click.echo(write_document(_document(base, new, comparison, exit_code), output, time.time()))
    return exit_code


def _document(base: Path, new: Path, comparison: Comparison, exit_code: int) -> dict[str, Any]:
    from dataclasses import asdict

    counts = {verdict: len(comparison.of_verdict(verdict)) for verdict in ("ok", "undecided", "slower")}
    files = {"base": str(base), "new": str(new)}
    return {"schema": 1, "command": "compare"} | files | counts | asdict(comparison) | {"exit_code": exit_code}


def _show(comparison: Comparison) -> None:
    from rich.table import Table

    from dcp_decode.presentation import plain_console

    table = Table(box=None, pad_edge=False)
    table.add_column("point, stage", overflow="fold")
    for heading in ("over", "base", "new", "ratio", "interval", "detectable"):
        table.add_column(heading, justify="left" if heading == "over" else "right")
    table.add_column("verdict")
    for stage in comparison.stages:
        change = stage.change
        table.add_row(
            f"{stage.point}: {stage.stage}",
            stage.baseline or "nothing (us)",
            f"{stage.base:.4g}",
            f"{stage.new:.4g}",
            f"{change.ratio:.3f}",
            f"{change.low:.3f} .. {change.high:.3f}",
            f"{stage.detectable:.3f}",
            stage.verdict,
        )
    console = plain_console()
    console.print(table)
    for note in comparison.notes:
        console.print(f"note: {note}")
    slower, undecided = (comparison.of_verdict(verdict) for verdict in ("slower", "undecided"))
    console.print(
        f"{len(slower)} slower than {comparison.limit:g} x, {len(undecided)} undecided, "
        f"of {len(comparison.stages)} stages at {comparison.confidence:.0%} confidence in all of them"
    )
