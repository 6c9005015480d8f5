"""What the regression gate reads of a results document (contract section 7), validated; everything else is ignored.

Samples stand in one of two places, always one a round, all series of a point in the same order:

    points           stages, peers and floors with `rounds_us`, a median a round (a checkpoint on a GPU)
    distributions    {"batch": 5, ..., "samples_us": {"layer_step": [...], "peer:torch": [...], "floor:launch": [...]}}

A run has `stages` with percentiles only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dcp_decode.errors import DcpDecodeError
from dcp_decode.inputs import read_input

Microseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class IncomparableInputs(DcpDecodeError):
    """Two documents that can't be compared; names the document's field and why."""


class Statistics(BaseModel):
    """Percentiles of a run's stage; null where it was never measured."""

    model_config = ConfigDict(frozen=True)

    p50_us: Microseconds | None = None
    p95_us: Microseconds | None = None
    samples: Annotated[int, Field(ge=0)] | None = None


class Place(BaseModel):
    """What names a point: the same in both documents. The variant is left out, since the best one may change."""

    model_config = ConfigDict(frozen=True)

    batch: int | None = None
    heads: int | None = None
    keys: int | None = None
    l2: str | None = None
    mode: str | None = None
    route: str | None = None


class Distribution(Place):
    """The samples of one measured point: series by name, sample i of each from the same round."""

    samples_us: dict[str, tuple[Microseconds, ...]]

    @property
    def name(self) -> str:
        """What was measured."""
        given = self.model_dump(include=set(Place.model_fields), exclude_none=True)
        return " ".join(f"{key}={value}" for key, value in given.items()) or "point"

    @property
    def stages(self) -> list[str]:
        return [name for name in self.samples_us if ":" not in name]

    @property
    def baselines(self) -> list[str]:
        """Series of peers and floors."""
        return [name for name in self.samples_us if ":" in name]


class Timed(Statistics):
    """A stage, peer or floor of a point. rounds_us: empty where only statistics were kept."""

    rounds_us: tuple[Microseconds, ...] = ()


class Peer(Timed):
    """Another implementation, timed at the same point."""

    name: str


class Point(Place):
    """One measured point of a checkpoint."""

    stages: dict[str, Timed]
    peers: tuple[Peer, ...] = ()
    floors: dict[str, Timed] = {}

    def distribution(self) -> Distribution | None:
        """The point's rounds by series; None if it has none."""
        stages = {name: timed.rounds_us for name, timed in self.stages.items() if timed.rounds_us}
        peers = {f"peer:{peer.name}": peer.rounds_us for peer in self.peers if peer.rounds_us}
        floors = {f"floor:{name}": floor.rounds_us for name, floor in self.floors.items() if floor.rounds_us}
        place = self.model_dump(include=set(Place.model_fields))
        return Distribution(samples_us=stages | peers | floors, **place) if stages else None


class Device(BaseModel):
    """Where the times come from."""

    model_config = ConfigDict(frozen=True)

    name: str
    architecture: str | None = None


class Document(BaseModel):
    """One results document."""

    model_config = ConfigDict(frozen=True)

    layout: Literal[1] = Field(alias="schema")
    command: str
    device: Device
    fabric: str | None = None
    route: str | None = None
    geometry: dict[str, Any] | None = None
    verified: bool | None = None
    versions: dict[str, str] = {}
    distributions: tuple[Distribution, ...] = ()
    points: tuple[Point, ...] = ()
    stages: dict[str, Statistics] | None = None

    def measured(self) -> list[Distribution]:
        """All points with samples."""
        of_points = (point.distribution() for point in self.points)
        return [*self.distributions, *(entry for entry in of_points if entry is not None)]


def read_document(path: Path) -> Document:
    """Raises IncomparableInputs for a file that is no results document, naming the field."""
    try:
        return validate(json.loads(read_input(path)))
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
