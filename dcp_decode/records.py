"""What a run leaves behind while it lives: a plan written once, and one record a rank, as JSON files in one folder.

    folder/plan.json      what was asked: command, config, launcher, ranks (written before the ranks start)
    folder/rank-3.json    how rank 3 ended: outcome, exit code, error, whom it waited for

A rank writes its record however it ends, SIGTERM included; a rank without one was killed. That rule is what names
the dead rank when a launcher (torchrun, mpirun) ends the survivors and returns a code of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dcp_decode.config import RunConfig
from dcp_decode.errors import WAIT_EXPIRED

# ok: ended in order. failed: a typed error, or a wrong result. crashed: an unexpected exception. terminated: told to
# stop (SIGTERM). killed: ended without a word of its own (written by the launcher for the rank, or supposed).
Outcome = Literal["ok", "failed", "crashed", "terminated", "killed"]

RECORDS_VARIABLE = "DCP_DECODE_RECORDS"  # folder that launch/*.sh hands to the ranks


@dataclass(frozen=True)
class RankReport:
    """What a rank's body returns: the figures of contract section 7, group-wide, the same on every rank.

    fabric, device, family: as resolved. verified: None if nothing was checked, False is exit code 1 and needs `error`,
    the line that says what is wrong. worst_error and error_bound: of the worst (row, head) of all ranks by
    error / bound, which worst_row names. refusals: why requests were refused, one line each. acceptance: entry a
    counts the turns that kept a drafts. keys_per_row: smallest, median and largest count of selected keys a row and
    rank. stages: name -> {p50_us, p95_us, p99_us, samples}, maximum over ranks per iteration; stage_clock: how they
    were timed. fabric_reason: why that fabric. execution: how a GPU ran the steps, None on a CPU. measurements:
    further keys of the document, such as a checkpoint's points.
    """

    fabric: str
    device: str
    family: str
    verified: bool | None
    worst_error: float | None
    error_bound: float | None
    checked_steps: int
    digest: str
    requests: dict[str, int]
    refusals: list[str]
    steps: int
    tokens: int
    acceptance: list[int]
    worst_row: str | None = None
    keys_per_row: tuple[int, float, int] | None = None
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    stage_clock: str = ""
    fabric_reason: str = ""
    execution: dict[str, Any] | None = None
    measurements: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class RankRecord:
    """How one rank's process ended. ended: seconds since the epoch. error: one line; traceback only if crashed.

    consequence: the error only repeats that a peer had died, so it is never a first cause. worst: worst_error,
    error_bound and worst_row of a wrong result that was raised, as far as it has them.
    """

    rank: int
    process_id: int
    hostname: str
    outcome: Outcome
    exit_code: int
    ended: float
    error: str | None = None
    consequence: bool = False
    traceback: str | None = None
    expired_waits: list[dict[str, object]] = field(default_factory=list)
    dead_peers: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    device: dict[str, Any] | None = None
    worst: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What was asked of a run. processes: ranks that write a record (1 for fabric loopback). config: as JSON."""

    command: str
    launcher: str
    processes: int
    config: dict[str, Any]
    geometry: dict[str, Any]
    output: str | None
    started: float


def make_plan(command: str, config: RunConfig, launcher: str, output: str | None) -> Plan:
    """The plan of a command for a launcher."""
    geometry = config.geometry()
    return Plan(
        command=command,
        launcher=launcher,
        processes=1 if config.parallel.fabric == "loopback" else geometry.dcp,
        config=config.model_dump(mode="json"),
        geometry=asdict(geometry),
        output=output,
        started=time.time(),
    )


def write_plan(folder: Path, plan: Plan) -> None:
    write_json(folder / "plan.json", asdict(plan))


def read_plan(folder: Path) -> Plan:
    """Raises OSError if the folder holds no plan."""
    return Plan(**json.loads((folder / "plan.json").read_text()))


def write_record(folder: Path, record: RankRecord) -> None:
    write_json(folder / f"rank-{record.rank}.json", asdict(record))


def read_records(folder: Path) -> dict[int, RankRecord]:
    """The records present, by rank; a damaged one counts for nothing, like that of a rank that left none."""
    records = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(ValueError, TypeError):
            records.append(RankRecord(**json.loads(path.read_text())))
    return {record.rank: record for record in sorted(records, key=lambda record: record.rank)}


def stopped(rank: int) -> RankRecord:
    """Of a rank that was ended, as all were, before it could leave a record."""
    now, error = time.time(), "told to stop"
    return RankRecord(rank, 0, "", "terminated", WAIT_EXPIRED, now, error, consequence=True)


def await_records(folder: Path, processes: int, patience_seconds: float) -> dict[int, RankRecord]:
    """The records present once all ranks have one, or after `patience_seconds`."""
    until = time.monotonic() + patience_seconds
    while len(records := read_records(folder)) < processes and time.monotonic() < until:
        time.sleep(0.02)
    return records


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file that is whole whenever it is there."""
    with written_aside(path) as partial:
        partial.write_text(json.dumps(document))


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A file to write that then takes the place of `path`: nobody sees half of it, though its writer may be killed."""
    partial = path.with_name(f".{path.name[-50:]}.{os.getpid()}")  # a name has 255 bytes at most
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
