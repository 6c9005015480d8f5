"""The checkpoint's table, its document and its HTML report, once its ranks have ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from dcp_decode.checkpoint import summary
from dcp_decode.errors import BAD_INPUT
from dcp_decode.presentation import plain_console
from dcp_decode.records import Plan
from dcp_decode.results import Conclusion, write_document, write_whole

UNREADABLE = (LookupError, TypeError, ValueError)  # of a document of another version


def publish(conclusion: Conclusion, plan: Plan, html: Path | None) -> None:
    """Write the document and its report, print the table, the error if there is one, and the document's path last."""
    if conclusion.exit_code == BAD_INPUT:
        print(f"error: {conclusion.error}", file=sys.stderr, flush=True)
        return
    document = conclusion.document
    path = write_document(document, plan.output or default_output(document, plan.started), plan.started)
    if document.get("points"):
        console, table = plain_console(), points_table(document)
        if not console.is_terminal:  # whole lines, for files and logs
            console.width = max(
                console.width, console.measure(table, options=console.options.update(width=1000)).maximum
            )
        console.print(table)
        for line in summary.notes(document):
            console.print(line, soft_wrap=True)
        sys.stdout.flush()
        try:
            render(path, document, html)
        except (OSError, *UNREADABLE) as error:  # hides neither the error below nor where the document is
            why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            print(f"no HTML report {report_path(path, html)}: {why}", file=sys.stderr, flush=True)
    if conclusion.error is not None:
        print(f"error: {conclusion.error}", file=sys.stderr, flush=True)
    print(path, flush=True)


def render(path: Path, document: Mapping[str, Any], html: Path | None) -> None:
    """Write the report to `html`, or beside the document; without its packages say so and go on.

    Raises OSError, or one of UNREADABLE for a document that lacks what the report shows.
    """
    try:
        from dcp_decode.checkpoint.report import render_report
    except ModuleNotFoundError as error:
        print(
            f"no HTML report: {error.name} is not installed (extra `report`); "
            f"elsewhere: dcp-decode checkpoint --render {path}",
            file=sys.stderr,
        )
        return
    target = report_path(path, html)
    write_whole(target, render_report(document))
    print(f"report: {target}", file=sys.stderr, flush=True)


def report_path(path: Path, html: Path | None) -> Path:
    """Where the report of a document is written."""
    return html or path.with_suffix(".html")


def default_output(document: Mapping[str, Any], started: float) -> str:
    """results/checkpoint-<GPU>-<UTC>.json, the GPU by its name without its maker's."""
    device = document.get("device") or {}
    name = re.sub(r"[^a-z0-9]+", "-", str(device.get("name") or "unknown").lower().replace("nvidia", "")).strip("-")
    stamp = datetime.fromtimestamp(started, UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"results/checkpoint-{name}-{stamp}.json"


def points_table(document: Mapping[str, Any]) -> Table:
    """One line a point: medians of the stages, the largest floor, and the fastest peers."""
    shown = [stage for stage in summary.STAGES if any(stage in point["stages"] for point in document["points"])]
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("B x keys", "heads", "L2", *(stage.replace("_", " ") for stage in shown), "floor", "x floor"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("best public peer", "best own peer"):
        table.add_column(name, no_wrap=True)
    for point in document["points"]:
        stages = [_number(summary.median(point, stage)) for stage in shown]
        floor = summary.largest_floor(point)
        decode = summary.median(point, "sparse_decode")
        over = f"{decode / floor[1]:.1f}" if floor and decode else ""
        extents = (f"{point['batch']} x {point['keys']}", str(point["heads"]), point["l2"])
        peers = [_peer(summary.lead(point, kind)) for kind in ("public", "own")]
        table.add_row(*extents, *stages, f"{floor[1]:.2f} {floor[0]}" if floor else "", over, *peers)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _peer(lead: tuple[Mapping[str, Any], float] | None) -> str:
    return "" if lead is None else f"{lead[0]['p50_us']:.2f} {lead[0]['name']} ({lead[1]:.2f} x)"
