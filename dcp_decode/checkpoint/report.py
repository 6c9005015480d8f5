"""The HTML report of a checkpoint's document: one file that needs nothing beside it. Needs jinja2 and matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2

from dcp_decode.checkpoint import summary
from dcp_decode.checkpoint.plots import figures

TEMPLATE = "report.html.j2"
FLOORS = {
    "launch": "empty kernel, same grid, cluster and shared memory, dependent launch",
    "launch_no_pdl": "the same without dependent launch",
    "chain_launch": "three empty kernels with the grids of the chain",
    "gather": "reads the row numbers, gathers the rows, writes as many bytes as the partial rows (Triton)",
    "bytes": "compulsory bytes of the sparse decode over copy bandwidth",
    "dependent_loads": "launch, then row number and key: two loads, each waiting for the one before",
    "solo_chain": "the chain on one rank alone, its peers' words in place",
    "solo_fused_chain": "the fused chain on one rank alone, its peers' words in place",
    "event_node": "two event nodes with nothing between them: part of each stage's time, of no chain's",
    "wire": "both NVLink crossings of a layer, modelled; in no time that one GPU measures",
}


def render_report(document: Mapping[str, Any]) -> str:
    """The whole page as text. Raises LookupError for a document that lacks what the page shows: its own point, too."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dcp_decode.checkpoint", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["us"] = lambda value: "" if value is None else f"{value:.2f}"
    own = summary.own_points(document)
    if not own:
        raise LookupError("the checkpoint's own point was not measured")
    values = {
        "document": document,
        "own": own,
        "stages": [name for name in summary.STAGES if any(name in point["stages"] for point in document["points"])],
        "figures": figures(document),
        "mode": summary.MODES[document["mode"]],
        "notes": summary.notes(document),
        "floors": FLOORS,
        "summary": summary,
        "cliffs": [
            (curve, *worst)
            for curve in summary.scalings(document)
            if (worst := curve.worst_cliff("sparse_decode")) is not None
        ],
    }
    try:
        return environment.get_template(TEMPLATE).render(values)
    except jinja2.UndefinedError as error:
        raise LookupError(error.message) from None
