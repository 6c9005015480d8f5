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
from dcp_decode.results import Conclusion, write_document

STAGES = ("query_push", "sparse_decode", "value_push", "merge", "chain", "fused_chain", "rank_skew")
MODES = {
    "solo": "solo: one rank's kernels; peers' words lie ready, no NVLink time in it",
    "loopback": "loopback: all ranks' work one after the other on one GPU, no NVLink time in it",
    "group": "group: real ranks, maximum over ranks per iteration",
}


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
        for line in notes(document):
            console.print(line, soft_wrap=True)
        sys.stdout.flush()
        render(path, document, html)
    if conclusion.error is not None:
        print(f"error: {conclusion.error}", file=sys.stderr, flush=True)
    print(path, flush=True)


def render(path: Path, document: Mapping[str, Any], html: Path | None) -> None:
    """Write the report to `html`, or beside the document; without its packages say so and go on."""
    try:
        from dcp_decode.checkpoint.report import render_report
    except ModuleNotFoundError as error:
        print(
            f"no HTML report: {error.name} is not installed (extra `report`); "
            f"elsewhere: dcp-decode checkpoint --render {path}",
            file=sys.stderr,
        )
        return
    target = html or path.with_suffix(".html")
    target.write_text(render_report(document))
    print(f"report: {target}", file=sys.stderr, flush=True)


def default_output(document: Mapping[str, Any], started: float) -> str:
    """results/checkpoint-<GPU>-<UTC>.json, the GPU by its name without its maker's."""
    device = document.get("device") or {}
    name = re.sub(r"[^a-z0-9]+", "-", str(device.get("name") or "unknown").lower().replace("nvidia", "")).strip("-")
    stamp = datetime.fromtimestamp(started, UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"results/checkpoint-{name}-{stamp}.json"


def points_table(document: Mapping[str, Any]) -> Table:
    """One line a point: medians of the stages, the largest floor, and the fastest peers."""
    shown = [stage for stage in STAGES if any(stage in point["stages"] for point in document["points"])]
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


def notes(document: Mapping[str, Any]) -> list[str]:
    """What must be known about the table's figures: a few lines."""
    lines = [f"microseconds, medians; {MODES[document['mode']]}"]
    wire = document["wire"]
    if document["mode"] != "group":
        modelled = wire["query_us"] + wire["value_us"]
        lines.append(f"wire, modelled and not in any figure above: {modelled:.2f} us a layer ({wire['source']})")
    for point in document["points"]:
        for group in summary.group_chains(point):
            lines.append(
                f"{point['batch']} x {point['keys']}, {point['l2']}: {group.name.replace('_', ' ')} "
                f"{group.chain:.2f} us, {group.chain - group.solo:+.2f} us on one rank alone ({group.solo:.2f} us); "
                f"NCCL between the stages' kernels {group.nccl:.2f} us, {group.nccl / group.chain:.1f} x"
            )
    own = document["points"][0]
    alone = own.get("variant_alone", own["variant"])
    if alone != own["variant"]:
        lines.append(f"the sparse decode alone is {alone}, in the chain {own['variant']}")
    for step in document["step"]:
        if step["within"] and any(step[extent] != own[extent] for extent in ("batch", "heads", "keys")):
            continue
        lines.append(
            f"verify step of {step['layers']} layers in one graph, {step.get('stage', 'chain').replace('_', ' ')}, "
            f"{step['batch']} x {step['keys']}, {step['heads']} heads, {step['l2']}: "
            f"{step['p50_us']:.1f} us, {'at most' if step['within'] else 'MORE THAN'} {step['allowed_us']:.1f} us "
            f"({step['layers']} x {step['layer_p50_us']:.2f} us + 5 %)"
        )
    for name, reason in dict.fromkeys(
        (peer["name"], peer["skipped"]) for point in document["points"] for peer in point["peers"] if peer["skipped"]
    ):
        lines.append(f"skipped peer {name}: {reason}")
    lines += [f"WRONG RESULT, not timed: {failure}" for failure in document.get("failures", ())]
    if document["verified"]:
        lines.append(
            f"verified before and after every timing, worst error {document['worst_error']:.3%} "
            f"of at most {document['error_bound']:.3%}"
        )
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _peer(lead: tuple[Mapping[str, Any], float] | None) -> str:
    return "" if lead is None else f"{lead[0]['p50_us']:.2f} {lead[0]['name']} ({lead[1]:.2f} x)"
