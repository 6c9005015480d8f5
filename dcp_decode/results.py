"""From a run's plan and records to its one JSON document and its exit code (contract section 7).

The first cause decides. In this order: the earliest typed failure of exit code 1 or 2 (no death can cause those); then
the earliest rank that crashed or was killed (without a record: at once); then the earliest expired wait; then whatever
else ended a rank. Ranks that only report a dead peer, or were told to stop, are never the cause while another is known.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dcp_decode import environment
from dcp_decode.errors import BAD_INPUT, VERIFIED, WAIT_EXPIRED, WRONG_RESULT, ConfigError, DcpDecodeError
from dcp_decode.records import Plan, RankRecord, written_aside

SCHEMA = 1
REPORT_KEYS = (
    "verified",
    "worst_error",
    "error_bound",
    "worst_row",
    "checked_steps",
    "digest",
    "requests",
    "refusals",
    "steps",
    "tokens",
    "acceptance",
    "keys_per_row",
    "stages",
    "stage_clock",
    "fabric_reason",
    "execution",
)


# Names of `mailbox.Stage` in stream order; not imported, since concluding a run needs no torch.
STAGE_ORDER = ("TOPK", "QUERY", "SPARSE", "PUSH", "MERGE")
LATEST = (math.inf, math.inf)


@dataclass(frozen=True)
class Conclusion:
    """How a run ended as a whole. error: the first cause, one line. dead_ranks: those that crashed or were killed."""

    exit_code: int
    error: str | None
    dead_ranks: tuple[int, ...]
    document: dict[str, Any]


class NotWritten(DcpDecodeError):
    """The document of a command that has ended can't be written; tells the document's error too, if it has one."""

    def __init__(self, path: Path, reason: str | None, document: Mapping[str, Any]) -> None:
        error = document.get("error")
        found = "" if error is None else f"{error}; and "
        super().__init__(f"{found}--output = {str(path)!r}: must be a file that can be written ({reason})")
        self.exit_code = document.get("exit_code") or BAD_INPUT


def conclude(plan: Plan, records: Mapping[int, RankRecord]) -> Conclusion:
    """Judge a run by the records of its ranks; a rank of the plan without a record was killed."""
    complete = [records.get(rank) or _lost(rank) for rank in range(plan.processes)]
    cause = _first_cause(complete)
    dead = tuple(record.rank for record in complete if record.outcome in ("crashed", "killed"))
    error = None
    if cause is not None:
        error = cause.error
        if cause.outcome in ("crashed", "killed"):
            error = f"rank {cause.rank} died: {cause.error}"
    exit_code = VERIFIED if cause is None else cause.exit_code
    document = _document(plan, complete) | {"exit_code": exit_code, "error": error, "dead_ranks": list(dead)}
    if cause is not None and exit_code == WRONG_RESULT:  # null would say that nothing was checked
        document |= cause.worst | {"verified": False}
    return Conclusion(exit_code, error, dead, document)


def write_document(document: Mapping[str, Any], output: str | None, started: float) -> Path:
    """Write to `document_path`; the path.

    Raises NotWritten, which ends the command with the document's own exit code if that says of a failure.
    """
    path = document_path(output, started)
    try:
        write_whole(path, document_text(document))
    except OSError as error:
        raise NotWritten(path, error.strerror, document) from None
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file, and the folders above it that are missing; if that fails, what was there stays. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device or a pipe: nothing may take its place
        path.write_text(text)
        return
    if path.exists() and not os.access(path, os.W_OK):  # a rename would not ask
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    with written_aside(path.resolve()) as partial:  # a link stays one
        partial.write_text(text)


def require_writable(output: str | None) -> None:
    """Refuse a document that couldn't be written, before the work that it would hold. Raises ConfigError."""
    require_writable_file("--output", document_path(output, time.time()))


def require_writable_file(option: str, path: Path) -> None:
    """Refuse the path of an option that `write_whole` couldn't write. Raises ConfigError.

    Writes and makes nothing, so a disk that is full later is found later.
    """
    path = path.absolute()
    reason = None
    for place in (path, *path.parents):
        try:
            is_folder = stat.S_ISDIR(place.stat().st_mode)
        except FileNotFoundError:
            continue
        except OSError as error:  # a file or a loop of links in the place of a folder, a name that is too long
            reason = error.strerror
        else:
            if is_folder and place == path:
                reason = "is a folder"
            elif not os.access(place, os.W_OK):
                reason = f"{place} is read-only"
            elif place == path and path.is_file() and not os.access(folder := path.resolve().parent, os.W_OK):
                reason = f"{folder} is read-only"
        break
    if reason is not None:
        raise ConfigError(option, str(path), f"must be a file that can be written ({reason})")


def document_path(output: str | None, started: float) -> Path:
    """`output`, or results/run-<utc>-<pid>.json under the working directory."""
    if output is not None:
        return Path(output)
    stamp = datetime.fromtimestamp(started, UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("results") / f"run-{stamp}-{os.getpid()}.json"


def document_text(document: Mapping[str, Any]) -> str:
    """The document as JSON; infinities and NaNs become null."""
    return json.dumps(_finite(document), indent=1, allow_nan=False) + "\n"


def _lost(rank: int) -> RankRecord:
    return RankRecord(rank, 0, "", "killed", WAIT_EXPIRED, -math.inf, "its process ended without a record")


def _first_cause(records: list[RankRecord]) -> RankRecord | None:
    def urgency(record: RankRecord) -> tuple[int, tuple[float, float], float]:
        if record.exit_code in (WRONG_RESULT, BAD_INPUT):
            return 0, LATEST, record.ended
        if record.outcome in ("crashed", "killed"):
            return 1, LATEST, record.ended
        # A wait at a later stage, or in a later use, follows from one at an earlier: the least advanced is the cause.
        return (
            3 if record.consequence else 2,
            min(map(wait_advance, record.expired_waits), default=LATEST),
            record.ended,
        )

    return min((record for record in records if record.outcome != "ok"), key=urgency, default=None)


def wait_advance(wait: Mapping[str, object]) -> tuple[float, float]:
    """(use, stage) of a mailbox wait, in stream order; control-plane waits come last."""
    stage, use = wait.get("stage"), wait.get("use")
    return (use, STAGE_ORDER.index(stage)) if stage in STAGE_ORDER and isinstance(use, int) else LATEST


def _document(plan: Plan, records: list[RankRecord]) -> dict[str, Any]:
    report = next((record.report for record in records if record.report is not None), None) or {}
    commit, dirty = environment.commit()
    return {
        "schema": SCHEMA,
        "command": plan.command,
        "config": plan.config,
        "geometry": plan.geometry,
        "seed": plan.config["workload"]["seed"],
        "commit": commit,
        "dirty": dirty,
        "launcher": plan.launcher,
        "fabric": report.get("fabric", plan.config["parallel"]["fabric"]),
        "route": plan.config["parallel"]["route"],
        "family": report.get("family"),
        "device": next((record.device for record in records if record.device is not None), None),
        "versions": environment.versions(),
        "ranks": plan.config["parallel"]["dcp"],
        "process_ids": [record.process_id or None for record in records],
        **{key: report.get(key) for key in REPORT_KEYS},
        **report.get("measurements", {}),
        "seconds": max((record.ended for record in records), default=plan.started) - plan.started,
        "expired_waits": [wait for record in records for wait in record.expired_waits],
        "records": [
            {
                "rank": record.rank,
                "process_id": record.process_id,
                "hostname": record.hostname,
                "outcome": record.outcome,
                "exit_code": record.exit_code,
                "error": record.error,
                "traceback": record.traceback,
                "ended": record.ended,
                "dead_peers": record.dead_peers,
            }
            for record in records
        ],
    }


def _finite(value: Any) -> Any:
    """JSON has no infinities and NaNs: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
