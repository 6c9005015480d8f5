"""The doctor's findings for a terminal (one table for all ranks, what differs set off) and as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dcp_decode.doctor.facts import RankFacts
from dcp_decode.doctor.gpus import Gpu, HostGpus
from dcp_decode.doctor.verdicts import Examination, Verdict, comparable

GIB = 2**30
DIFFERS = "bold yellow"


def document(examination: Examination, ranks: Sequence[RankFacts]) -> dict[str, Any]:
    """Everything, as JSON: `ready`, `answer`, the verdicts, `differences`, and every rank's facts."""
    return {"schema": 1, "command": "doctor"} | asdict(examination) | {"ranks": [asdict(facts) for facts in ranks]}


def show(console: Console, examination: Examination, ranks: Sequence[RankFacts]) -> None:
    """Print the tables and, last, the verdict."""
    console.print(_facts(ranks, {difference.fact for difference in examination.differences}))
    for host in dict.fromkeys(facts.host for facts in ranks):
        first = next(facts for facts in ranks if facts.host == host)
        if first.gpus.gpus:
            console.print(_gpus(host, first.gpus))
    for title, verdicts in (
        ("fabric", examination.fabrics),
        ("kernels", examination.kernels),
        ("launcher", examination.launchers),
        ("kernels built ahead of time", examination.builds),
    ):
        if verdicts:
            console.print(_verdicts(title, verdicts))
    console.print(_answer(examination))


def _facts(ranks: Sequence[RankFacts], differing: set[str]) -> Table:
    """One column for each set of ranks that are alike, one row for each fact."""
    alike: dict[tuple[object, ...], list[RankFacts]] = {}
    for facts in ranks:
        alike.setdefault((facts.host, *comparable(facts).items()), []).append(facts)
    titles = (_title([member.rank for member in group], len(ranks)) for group in alike.values())
    table = Table("", *titles, box=None)
    columns = [_shown(group[0]) for group in alike.values()]
    for fact in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(fact, "absent") for column in columns]
        style = DIFFERS if fact in differing else ""
        table.add_row(f"{fact} (differs)" if fact in differing else fact, *values, style=style)
    return table


def _shown(facts: RankFacts) -> dict[str, str]:
    shared = f"{facts.shared_memory_free_bytes / GIB:.1f} of {facts.shared_memory_bytes / GIB:.1f} GiB free"
    shown = {"host": facts.host} | comparable(facts)
    return shown | {"memory": f"{facts.memory_bytes / GIB:.0f} GiB", "/dev/shm": shared}


def _title(ranks: list[int], everyone: int) -> str:
    if everyone == 1:
        return "this process"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)


def _gpus(host: str, found: HostGpus) -> Table:
    """The GPUs of a host, each with its way to the others: NVLinks, or the ancestor on PCIe; ! is no peer access."""
    gpus = found.gpus
    table = Table(f"GPUs of {host}", "", "memory", "NVLinks", *(str(gpu.index) for gpu in gpus), box=None)
    ways = {(path.first, path.second): path.kind + ("" if path.peer_access else "!") for path in found.paths}
    for gpu in gpus:
        row = (_way(ways, gpu, other) for other in gpus)
        mode = " in MIG mode" if gpu.partitioned else ""
        name = f"{gpu.name}, {gpu.architecture}{mode}"
        table.add_row(str(gpu.index), name, f"{gpu.memory_bytes / GIB:.0f} GiB", str(gpu.nvlinks), *row)
    return table


def _way(ways: dict[tuple[int, int], str], one: Gpu, other: Gpu) -> str:
    if one == other:
        return "-"
    first, second = sorted((one.index, other.index))
    return ways.get((first, second), "unknown")


def _verdicts(title: str, verdicts: Sequence[Verdict]) -> Table:
    table = Table(title, "works", "how, or why not", box=None)
    for verdict in verdicts:
        table.add_row(
            verdict.name, Text("yes" if verdict.works else "no", "green" if verdict.works else "red"), verdict.reason
        )
    return table


def _answer(examination: Examination) -> Group:
    lines = [
        Text(
            f"ranks differ in {difference.fact}: "
            + "; ".join(f"{value!r} on {_title(list(ranks), 2)}" for value, ranks in difference.values.items()),
            DIFFERS,
        )
        for difference in examination.differences
    ]
    word, style = ("ready", "bold green") if examination.ready else ("not ready", "bold red")
    return Group(*lines, Text.assemble((f"{word}: ", style), examination.answer))
