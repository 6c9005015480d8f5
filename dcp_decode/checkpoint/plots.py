"""The report's figures, as SVG text to be set into its page: bars, distributions and scaling. Needs matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dcp_decode.checkpoint import summary
from dcp_decode.checkpoint.summary import Scaling

OURS, CHAIN, PUBLIC, OWN, FLOOR, WIRE = "#0b5fa5", "#5b8fc7", "#c0563b", "#d9a441", "#3f3f3f", "#9a9a9a"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "checkpoint",  # element ids that don't change from run to run
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}
STAGE_FLOORS = {
    "query_push": "launch",
    "value_push": "launch",
    "merge": "launch",
    "chain": "chain_launch",
    "fused_chain": "launch",
}


def stage_bars(points: Mapping[str, summary.Point]) -> str:
    """Medians of every stage with their floors, one panel an L2 state; the modelled wire apart."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
        for axes, (l2, point) in zip(panels, points.items(), strict=True):
            names = [name for name in summary.STAGES if name in point["stages"]]
            for place, name in enumerate(names):
                times = point["stages"][name]
                color = OURS if name == "sparse_decode" else CHAIN
                axes.bar(place, times["p50_us"], color=color, width=0.6)
                axes.plot([place, place], [times["p50_us"], times["p99_us"]], color="#1d1d1d", linewidth=1.2)
                _label(axes, place, times["p99_us"], f"{times['p50_us']:.2f}")
                floor = _stage_floor(point, name)
                if floor is not None:
                    axes.plot([place - 0.36, place + 0.36], [floor] * 2, color=FLOOR, linewidth=2)
            wire = point["floors"].get("wire") if point["mode"] != "group" else None
            if wire:
                axes.bar(len(names), wire["p50_us"], width=0.6, fill=False, hatch="///", edgecolor=WIRE)
                _label(axes, len(names), wire["p50_us"], f"{wire['p50_us']:.2f}")
            ticks = [name.replace("_", " ") for name in names] + (["wire\n(modelled)"] if wire else [])
            axes.set_xticks(range(len(ticks)), [tick.replace(" ", "\n", 1) for tick in ticks])
            axes.grid(axis="x", visible=False)
            axes.set_title(f"keys {l2} in L2" if l2 == "hot" else "keys evicted from L2 (cold)", loc="left")
        panels[0].set_ylabel("us a layer, median (line: to p99)")
        panels[-1].plot([], [], color=FLOOR, linewidth=2, label="floor")
        panels[-1].legend(loc="upper right")
        return _svg(figure, "Stages against their floors")


def peer_bars(point: summary.Point) -> str:
    """Our sparse decode (of real ranks: our chains) and every peer that ran at a point, the fastest on top."""
    rows = [
        (f"{name.replace('_', ' ')} (this project)", own, OURS)
        for name in summary.compared_stages(point)
        if (own := summary.median(point, name)) is not None
    ]
    rows += [
        (f"{peer['name']} ({peer['kind']})", peer["p50_us"], PUBLIC if peer["kind"] == "public" else OWN)
        for peer in summary.timed_peers(point)
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.6 + 0.36 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for place, (_, time, color) in enumerate(rows):
            axes.barh(place, time, color=color, height=0.62)
            axes.annotate(f"{time:.2f}", (time, place), (4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
        axes.set_xlabel("us, median")
        return _svg(figure, "Peers")


def distributions(point: summary.Point) -> str:
    """Share of rounds at or below a time, for the stages and for the fastest peer of each kind."""
    series = [(name.replace("_", " "), times.get("rounds_us")) for name, times in point["stages"].items()]
    leads = (summary.lead(point, kind) for kind in ("public", "own"))
    series += [(lead[0]["name"], lead[0]["rounds_us"]) for lead in leads if lead is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.0), layout="constrained")
        axes = figure.subplots()
        for name, rounds in series:
            if rounds:
                axes.ecdf(np.array(rounds), label=name)
        axes.set_xlabel("us, mean of a replay's layers")
        axes.set_ylabel("share of rounds")
        axes.set_xlim(left=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return _svg(figure, "Distribution over rounds")


def scaling(curves: Sequence[Scaling]) -> str:
    """Time against one extent: sparse decode, chain, the fastest public and own peer, and the largest floor."""
    axis = curves[0].axis
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, curve in zip(panels, curves, strict=True):
            _curve(axes, curve.extents, curve.times("sparse_decode"), "sparse decode", OURS, "o-")
            _curve(axes, curve.extents, curve.times("chain"), "chain", CHAIN, "s-")
            _curve(axes, curve.extents, curve.times("fused_chain"), "fused chain", CHAIN, "d--")
            for kind, color in (("public", PUBLIC), ("own", OWN)):
                leads = [summary.lead(point, kind) for point in curve.points]
                _curve(
                    axes,
                    curve.extents,
                    [lead and lead[0]["p50_us"] for lead in leads],
                    f"best {kind} peer",
                    color,
                    "^:",
                )
            _curve(axes, curve.extents, curve.floors(), "floor", FLOOR, "--")
            axes.set_title(curve.l2, loc="left")
            axes.set_xlabel({"batch": "verify rows B", "keys": "keys a row and rank", "heads": "query heads"}[axis])
            if axis == "keys":
                axes.set_xscale("log", base=2)
            ticks = labelled(curve.extents, math.log2 if axis == "keys" else float)
            axes.set_xticks(ticks, [str(extent) for extent in ticks])
            axes.minorticks_off()
        panels[0].set_ylim(bottom=0)  # once both panels have said how high they reach
        panels[0].set_ylabel("us, median")
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return _svg(figure, f"Scaling over {axis}")


def _stage_floor(point: summary.Point, stage: str) -> float | None:
    if stage == "sparse_decode":
        floor = summary.largest_floor(point)
        return floor[1] if floor else None
    name = STAGE_FLOORS.get(stage)
    return point["floors"][name]["p50_us"] if name in point["floors"] else None


def _curve(
    axes: Axes, extents: Sequence[int], times: Sequence[float | None], label: str, color: str, look: str
) -> None:
    known = [(extent, time) for extent, time in zip(extents, times, strict=True) if time is not None]
    if known:
        axes.plot(*zip(*known, strict=True), look, label=label, color=color, markersize=4, linewidth=1.4)


def labelled(extents: Sequence[int], place: Callable[[int], float]) -> list[int]:
    """Those of ascending extents whose labels stay apart on an axis where they lie at `place`: an eighth of it.

    The first and the last are among them.
    """
    first, *others = extents
    kept = [first]
    apart = (place(extents[-1]) - place(first)) / 8
    for extent in others:
        if place(extent) - place(kept[-1]) >= apart:
            kept.append(extent)
        elif extent == extents[-1]:
            kept[-1:] = [extent] if len(kept) > 1 else [first, extent]
    return kept


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (0, 3), textcoords="offset points", ha="center", va="bottom")


def _svg(figure: Figure, title: str) -> str:
    """The figure as an <svg> element that fills its container; ids are made unique by the title."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Title": title, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    prefix = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    width = re.search(r'<svg[^>]*?width="([\d.]+)pt"', svg)
    assert width is not None
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" style="max-width:{width[1]}pt" ', 1)


def figures(document: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure that a document has data for, by name; `scaling` is a list."""
    own = summary.own_points(document)
    drawn: dict[str, Any] = {"stages": stage_bars(own)}
    compared = own.get("cold") or own["hot"]
    if summary.timed_peers(compared):
        drawn["peers"] = peer_bars(compared)
    if any(times.get("rounds_us") for times in compared["stages"].values()):
        drawn["distribution"] = distributions(compared)
    by_axis: dict[str, list[Scaling]] = {}
    for curve in summary.scalings(document):
        by_axis.setdefault(curve.axis, []).append(curve)
    drawn["scaling"] = [scaling(curves) for curves in by_axis.values()]
    return drawn
