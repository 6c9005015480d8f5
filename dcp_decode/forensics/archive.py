"""One archive a failed run: everything its ranks and its launcher left, beside the run's JSON document.

    run.json -> run.forensics.tar.gz:  manifest.json, document.json, plan.json,
                                       rank-<r>.json, forensics-<r>.json, stacks-<r>.txt

Written aside and renamed, so a name that exists is a whole archive. It is read in memory and never unpacked. No torch.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dcp_decode.errors import DcpDecodeError
from dcp_decode.forensics.evidence import ExpiredWait, RankEvidence
from dcp_decode.inputs import read_input
from dcp_decode.records import Plan, RankRecord, written_aside
from dcp_decode.results import document_text

FORMAT = "dcp_decode forensics"
SCHEMA = 1
LARGEST_MEMBER_BYTES = 64 << 20
LARGEST_ARCHIVE_BYTES = 512 << 20
MOST_RANKS = 1024


class BadArchive(DcpDecodeError):
    """A file that is no archive of ours, or a damaged one."""


class _Document(BaseModel):
    """What a diagnosis reads of the run's JSON document."""

    model_config = ConfigDict(frozen=True)

    command: str
    launcher: str
    fabric: str
    route: Literal["push", "local"]
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    exit_code: int
    error: str | None
    versions: dict[str, str]
    commit: str | None = None


class _Geometry(BaseModel):
    generations: Annotated[int, Field(ge=1)]


class _Plan(BaseModel):
    """What a diagnosis reads of the run's plan."""

    processes: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    geometry: _Geometry


@dataclass(frozen=True)
class Case:
    """A failed run as its archive has it. processes: ranks that had a process of their own, from rank 0.

    expired: waits by the record that has them. stacks: text of faulthandler by rank, where it wrote any.
    """

    document: _Document
    processes: int
    generations: int
    records: dict[int, RankRecord]
    expired: dict[int, tuple[ExpiredWait, ...]]
    evidence: dict[int, RankEvidence]
    stacks: dict[int, str]


def write(path: Path, plan: Plan, folder: Path, document: dict[str, Any]) -> None:
    """Pack what lies in the folder of a run that failed, with its plan and document. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        "manifest.json": json.dumps({"format": FORMAT, "schema": SCHEMA}),
        "document.json": document_text(document),
        "plan.json": document_text(asdict(plan)),
    }
    with written_aside(path) as partial, tarfile.open(partial, "w:gz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        # A name with a dot in front is half a file of a rank that was killed while it wrote.
        for left in sorted(folder.iterdir()):
            if left.name not in texts and not left.name.startswith(".") and left.stat().st_size:
                archive.add(left, left.name)


def read(path: Path) -> Case:
    """Raises BadArchive."""
    try:
        members = dict(_members(path))
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadArchive(f"{path}: is damaged or no forensics archive ({error})") from None
    except OSError as error:
        raise BadArchive(f"{path}: can't be read ({error.strerror})") from None
    manifest = members.get("manifest.json")
    if manifest is None or _parsed(path, "manifest.json", manifest, dict[str, Any]).get("format") != FORMAT:
        raise BadArchive(f"{path}: is no forensics archive of dcp-decode (no manifest of the format)")
    schema = _parsed(path, "manifest.json", manifest, dict[str, Any]).get("schema")
    if schema != SCHEMA:
        raise BadArchive(f"{path}: manifest.json: schema = {schema!r}: must be {SCHEMA}")
    for name in ("document.json", "plan.json"):
        if name not in members:
            raise BadArchive(f"{path}: is damaged: {name} is missing")
    plan = _parsed(path, "plan.json", members["plan.json"], _Plan)
    records = _by_rank(members, "rank-", lambda name, text: _parsed(path, name, text, RankRecord))
    waits = {rank: json.dumps(record.expired_waits).encode() for rank, record in records.items()}
    return Case(
        document=_parsed(path, "document.json", members["document.json"], _Document),
        processes=plan.processes,
        generations=plan.geometry.generations,
        records=records,
        expired={
            rank: _parsed(path, f"rank-{rank}.json.expired_waits", text, tuple[ExpiredWait, ...])
            for rank, text in waits.items()
        },
        evidence=_by_rank(members, "forensics-", lambda name, text: _parsed(path, name, text, RankEvidence)),
        stacks=_by_rank(members, "stacks-", lambda _, text: text.decode(errors="replace")),
    )


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    total = 0
    with tarfile.open(fileobj=io.BytesIO(read_input(path)), mode="r:gz") as archive:
        for member in archive:
            total += member.size
            if member.size > LARGEST_MEMBER_BYTES or total > LARGEST_ARCHIVE_BYTES:
                raise BadArchive(f"{path}: is no forensics archive ({member.name} is too large)")
            stream = archive.extractfile(member)
            if stream is not None:
                yield member.name, stream.read()


def _by_rank(members: dict[str, bytes], prefix: str, parse: Callable[[str, bytes], Any]) -> dict[int, Any]:
    parsed = {}
    for name, text in members.items():
        number = name.removeprefix(prefix).partition(".")[0]
        if name.startswith(prefix) and number.isdecimal() and len(number) <= len(str(MOST_RANKS)):
            parsed[int(number)] = parse(name, text)
    return dict(sorted(parsed.items()))


def _parsed(path: Path, name: str, text: bytes, kind: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    place = ".".join([name, *map(str, first["loc"])])
    raise BadArchive(f"{path}: is damaged: {place}: {first['msg']}") from None
