"""What the regression gate reads of a results document (contract section 7), validated; everything else is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp_decode.errors import DcpDecodeError

Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class IncomparableInputs(DcpDecodeError):
    """Two documents that can't be compared; names the document's field and why."""


class Statistics(BaseModel):
    """Times of one stage, peer or floor. rounds_us: a median a round, interleaved with all others of its point."""

    model_config = ConfigDict(frozen=True)

    p50_us: Microseconds | None = None  # null: never measured
    p95_us: Microseconds | None = None
    samples: Annotated[int, Field(ge=0)] | None = None
    rounds_us: tuple[Microseconds, ...] = ()


class Peer(Statistics):
    """Another implementation, timed at the same point."""

    name: str
    skipped: Any = None  # why it was not timed


class Point(BaseModel):
    """One measured point of a checkpoint."""

    model_config = ConfigDict(frozen=True)

    batch: int | None = None
    heads: int | None = None
    keys: int | None = None
    l2: str | None = None
    mode: str | None = None
    route: str | None = None
    stages: dict[str, Statistics]
    peers: tuple[Peer, ...] = ()
    floors: dict[str, Statistics] = {}

    @property
    def name(self) -> str:
        """What was measured, as far as the document says: the same in both documents."""
        keys = ("batch", "heads", "keys", "l2", "mode", "route")
        given = {key: getattr(self, key) for key in keys}
        return " ".join(f"{key}={value}" for key, value in given.items() if value is not None) or "run"


class Device(BaseModel):
    """Where the times come from."""

    model_config = ConfigDict(frozen=True)

    name: str
    architecture: str | None = None


class Document(BaseModel):
    """One results document; `points` of a checkpoint, or `stages` of a run."""

    model_config = ConfigDict(frozen=True)

    layout: Literal[1] = Field(alias="schema")
    command: str
    device: Device
    fabric: str | None = None
    route: str | None = None
    geometry: dict[str, Any] | None = None
    verified: bool | None = None
    versions: dict[str, str] = {}
    points: tuple[Point, ...] | None = None
    stages: dict[str, Statistics] | None = None

    def measured(self) -> dict[str, Point]:
        """The points by name; a run is one point without a name of its own. Raises IncomparableInputs."""
        points = self.points
        if points is None and self.stages is not None:
            points = (Point(stages=self.stages),)
        if not points:
            raise IncomparableInputs("points: must not be empty, and there are no stages either")
        named = {point.name: point for point in points}
        if len(named) < len(points):
            twice = next(name for name in named if sum(point.name == name for point in points) > 1)
            raise IncomparableInputs(f"points: {twice} is there twice")
        return named


def read_document(path: Path) -> Document:
    """Raises IncomparableInputs for a file that is no results document, naming the field."""
    try:
        return validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise IncomparableInputs(f"{path}: can't be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise IncomparableInputs(f"{path}: is not JSON ({error})") from None
    except IncomparableInputs as error:
        raise IncomparableInputs(f"{path}: {error}") from None


def validate(document: object) -> Document:
    """The document behind parsed JSON. Raises IncomparableInputs."""
    try:
        return Document.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "the document"
    raise IncomparableInputs(f"{field} = {_shortened(first['input'])}: {first['msg'].lower()}")


def _shortened(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
