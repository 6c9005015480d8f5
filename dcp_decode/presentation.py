"""What the user sees: a progress bar on a terminal, a short table at the end, errors as one line.

Progress goes to standard error and only to a terminal; the table and, as the last line, the path of the JSON document
go to standard output.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dcp_decode.errors import BAD_INPUT
from dcp_decode.records import Plan
from dcp_decode.results import Conclusion, write_document

if TYPE_CHECKING:  # a conclusion is shown without torch
    from dcp_decode import run

PLAIN_WIDTH = 160  # of a line when standard output is no terminal


@contextlib.contextmanager
def progress_bar(max_steps: int | None) -> Iterator[Callable[[run.Progress], None]]:
    """A callable to call after every step; draws only if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("steps", total=max_steps, figures="")

        def show(progress: run.Progress) -> None:
            worst = f"{progress.worst.error:.2%}" if progress.worst.bound else "unchecked"
            requests = f"{progress.requests['finished']}/{progress.requests['in']}"
            figures = f"requests {requests}  tokens {progress.tokens}  worst error {worst}"
            bar.update(task, completed=progress.steps, figures=figures)

        yield show


def plain_console() -> Console:
    """Standard output for tables: as wide as the terminal, or PLAIN_WIDTH."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def publish(conclusion: Conclusion, plan: Plan) -> None:
    """Write the document, print the table, an error if there is one, and the document's path as the last line.

    Bad input or environment: if no rank came to its end, there is only the error.
    """
    if conclusion.exit_code == BAD_INPUT and conclusion.document["digest"] is None:
        print(f"error: {conclusion.error}", file=sys.stderr, flush=True)
        return
    path = write_document(conclusion.document, plan.output, plan.started)
    if conclusion.document["digest"] is not None:
        plain_console().print(_table(conclusion.document))
        sys.stdout.flush()
    if conclusion.error is not None:
        print(f"error: {conclusion.error}", file=sys.stderr, flush=True)
    if conclusion.document.get("forensics") is not None:
        print(f"forensics: {conclusion.document['forensics']}", file=sys.stderr, flush=True)
    print(path, flush=True)


def _table(document: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    requests = document["requests"]
    table.add_row("fabric", f"{document['fabric']} ({document['fabric_reason']})")
    table.add_row("requests", ", ".join(f"{count} {state}" for state, count in requests.items()))
    for refusal in document["refusals"]:
        table.add_row("refused", refusal)
    table.add_row("steps, tokens", f"{document['steps']}, {document['tokens']}")
    table.add_row("accepted drafts", _acceptance(document["acceptance"]))
    if document["keys_per_row"] is not None:
        smallest, median, largest = document["keys_per_row"]
        table.add_row("keys a row and rank", f"min {smallest}, median {median:g}, max {largest}")
    if document["execution"] is not None:
        table.add_row("replayed steps", _execution(document["execution"]))
    for stage, times in document["stages"].items():
        table.add_row(stage.replace("_", " "), _times(times))
    table.add_row("stage times", document["stage_clock"])
    table.add_row("verified", _verdict(document))
    table.add_row("digest", document["digest"])
    return table


def _times(times: Mapping[str, float]) -> str:
    if not times["samples"]:
        return "not timed"
    return f"p50 {_microseconds(times['p50_us'])}, p95 {_microseconds(times['p95_us'])}"


def _microseconds(value: float) -> str:
    return f"{value:.0f} us" if value >= 100 else f"{value:.1f} us"


def _execution(execution: Mapping[str, Any]) -> str:
    replays = execution["replays"]
    replayed = f"{replays} of {replays + execution['eager_steps']}"
    if not replays:
        return replayed
    return f"{replayed}, each {_times(execution['replayed_step'])}; host work {_times(execution['host_work'])}"


def _acceptance(histogram: list[int]) -> str:
    turns = sum(histogram)
    mean = sum(drafts * count for drafts, count in enumerate(histogram)) / turns if turns else 0.0
    return f"{mean:.2f} a turn ({', '.join(f'{drafts}: {count}' for drafts, count in enumerate(histogram))})"


def _verdict(document: Mapping[str, Any]) -> str:
    if document["verified"] is None:
        return "not checked"
    verdict = f"{'yes' if document['verified'] else 'NO'}, {document['checked_steps']} steps"
    if document["worst_error"] is None:
        return verdict
    return f"{verdict}, worst error {document['worst_error']:.3%} of at most {document['error_bound']:.3%}"
