"""What the user sees: a progress bar on a terminal, a short table at the end, errors as one line.

Progress goes to standard error and only to a terminal; the table and, as the last line, the path of the JSON document
go to standard output.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from dcp_decode.records import Plan, Progress
from dcp_decode.results import Conclusion, write_document

ShowProgress = Callable[[Progress], None]


@contextlib.contextmanager
def progress_bar(max_steps: int | None) -> Iterator[ShowProgress]:
    """A callable to call after every step; draws only if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("steps", total=max_steps, figures="")

        def show(progress: Progress) -> None:
            worst = "unchecked" if progress.worst_error is None else f"{progress.worst_error:.2%}"
            figures = (
                f"requests {progress.requests_finished}/{progress.requests_in}  "
                f"tokens {progress.tokens}  worst error {worst}"
            )
            bar.update(task, completed=progress.steps, figures=figures)

        yield show


def publish(conclusion: Conclusion, plan: Plan) -> None:
    """Write the document, print the table, an error if there is one, and the document's path as the last line."""
    path = write_document(conclusion.document, plan.output, plan.started)
    if conclusion.document["digest"] is not None:
        Console(highlight=False).print(_table(conclusion.document))
        sys.stdout.flush()
    if conclusion.error is not None:
        print(f"dcp-decode: {conclusion.error}", file=sys.stderr, flush=True)
    print(path, flush=True)


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    requests = document["requests"]
    table.add_row("requests", ", ".join(f"{count} {state}" for state, count in requests.items()))
    table.add_row("steps, tokens", f"{document['steps']}, {document['tokens']}")
    table.add_row("accepted drafts", _acceptance(document["acceptance"]))
    if document["keys_per_row"] is not None:
        smallest, median, largest = document["keys_per_row"]
        table.add_row("keys a row and rank", f"min {smallest}, median {median:g}, max {largest}")
    for stage, times in document["stages"].items():
        table.add_row(stage.replace("_", " "), f"p50 {times['p50_us']:.0f} us, p95 {times['p95_us']:.0f} us")
    table.add_row("verified", _verdict(document))
    table.add_row("digest", document["digest"])
    return table


def _acceptance(histogram: list[int]) -> str:
    turns = sum(histogram)
    mean = sum(drafts * count for drafts, count in enumerate(histogram)) / turns if turns else 0.0
    return f"{mean:.2f} a turn ({', '.join(f'{drafts}: {count}' for drafts, count in enumerate(histogram))})"


def _verdict(document: Mapping[str, Any]) -> str:
    if document["verified"] is None:
        return "not checked"
    worst = f"worst error {document['worst_error']:.3%} of at most {document['error_bound']:.3%}"
    return f"{'yes' if document['verified'] else 'NO'}, {document['checked_steps']} steps, {worst}"
