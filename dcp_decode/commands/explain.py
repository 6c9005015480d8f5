"""`dcp-decode explain`: who waited for whom in a failed run, and the first cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_decode.errors import VERIFIED

if TYPE_CHECKING:
    from dcp_decode.forensics.archive import Case
    from dcp_decode.forensics.diagnosis import Diagnosis


@click.command()
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def explain(archive: Path, as_json: bool) -> int:
    """Print the first cause of a failed run from its forensics ARCHIVE, and who waited for whom.

    Exit code 0 if the archive could be read, whatever it says.
    """
    import json

    from dcp_decode.forensics.archive import read
    from dcp_decode.forensics.diagnosis import diagnose

    case = read(archive)
    diagnosis = diagnose(case)
    if as_json:
        click.echo(json.dumps(_document(case, diagnosis), indent=1))
    else:
        _show(case, diagnosis)
    return VERIFIED


def _document(case: Case, diagnosis: Diagnosis) -> dict[str, Any]:
    from dataclasses import asdict

    from dcp_decode.forensics.diagnosis import waits

    return {
        "schema": 1,
        "command": "explain",
        "first_cause": asdict(diagnosis),
        "waits": [wait.model_dump(exclude_defaults=True) for wait in waits(case)],
        "run": case.document.model_dump(),
        "evidence": {rank: evidence.model_dump() for rank, evidence in case.evidence.items()},
    }


def _show(case: Case, diagnosis: Diagnosis) -> None:
    from rich.markup import escape
    from rich.table import Table

    from dcp_decode.forensics.diagnosis import control_words, processes, states_seen, torn_rows, waits
    from dcp_decode.presentation import plain_console

    console = plain_console()
    document = case.document
    console.print(f"first cause: {diagnosis.kind}", style="bold")
    console.print(escape(diagnosis.sentence))
    for line in diagnosis.details:
        console.print(f"  {escape(line)}")

    table = Table("waiting rank", "for rank", "in", title="who waited for whom", title_justify="left", box=None)
    for wait in waits(case):
        table.add_row(str(wait.waiting_rank), str(wait.source_rank), escape(str(wait)))
    console.print()
    console.print(table if table.row_count else "nobody waited")

    columns = ("rank", "host", "process", "seen as", "ended", "stood at", "uses", "torn rows")
    table = Table(*columns, title="ranks", title_justify="left", box=None)
    states, known = states_seen(case), processes(case)
    summarized = {mailbox.rank for evidence in case.evidence.values() for mailbox in evidence.mailboxes}
    for rank in range(document.ranks):
        record, evidence, words = case.records.get(rank), case.evidence.get(rank), control_words(case, rank)
        table.add_row(
            str(rank),
            known[rank].hostname if rank in known else "?",
            str(known[rank].process_id) if rank in known else "?",
            states.get(rank, "?"),
            record.outcome if record is not None else "no record" if rank < case.processes else "in process 0",
            "?" if evidence is None else str(evidence.position),
            "?" if words is None else "/".join(map(str, words.uses.values())) + (" aborted" if words.aborted else ""),
            str(len(torn_rows(case, rank))) if rank in summarized else "?",
        )
    console.print()
    console.print(table)
    for rank, evidence in case.evidence.items():
        if evidence.problem is not None:
            console.print(f"rank {rank}: {escape(evidence.problem)}")
    console.print(
        f"\n{document.command} on {document.ranks} ranks, launcher {document.launcher}, fabric {document.fabric}, "
        f"exit code {document.exit_code}: {escape(str(document.error))}"
    )
