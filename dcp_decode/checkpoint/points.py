"""What a checkpoint measures: its points, in order, from the config. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dcp_decode.config import RunConfig
from dcp_decode.geometry import Geometry

L2State = Literal["hot", "cold"]


@dataclass(frozen=True)
class Shape:
    """Verify rows B, gathered query heads, and keys of every row on the measured rank."""

    batch: int
    heads: int
    keys: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.keys}, {self.heads} heads"


@dataclass(frozen=True)
class Point:
    """One shape with the keys in L2 (hot) or evicted (cold).

    compared: peers and floors are measured here too. sweep: every kernel variant is.
    """

    shape: Shape
    l2: L2State
    compared: bool
    sweep: bool


def own_shape(config: RunConfig) -> Shape:
    """The model's own point: one request's verify rows and an even share of its top-k."""
    return own_shape_in(config.model_dump())


def own_shape_in(config: Mapping[str, Any]) -> Shape:
    """The same of a config as a document holds it. Raises LookupError if it lacks what that needs."""
    service, model, parallel = config["service"], config["model"], config["parallel"]
    return Shape(service["draft_tokens"] + 1, model["heads"], max(1, model["topk"] // parallel["dcp"]))


def plan_points(config: RunConfig, quick: bool = False) -> list[Point]:
    """The points of a checkpoint, its own shape first; quick: only that one, without the sweep."""
    own, chosen = own_shape(config), config.checkpoint
    compared = [own]
    scaled: list[Shape] = []
    if not quick:
        compared += [replace(own, batch=batch) for batch in chosen.compared_batches]
        compared += [replace(own, keys=keys) for keys in chosen.compared_keys]
        scaled += [replace(own, batch=batch) for batch in chosen.batches]
        scaled += [replace(own, keys=keys) for keys in chosen.keys]
        scaled += [replace(own, heads=heads) for heads in chosen.heads]
    states: tuple[L2State, ...] = ("hot", "cold")
    return [
        Point(shape, l2, shape in compared, chosen.sweep and not quick and shape in compared)
        for shape in dict.fromkeys(compared + scaled)
        for l2 in states
    ]


def geometry_of(config: RunConfig, shape: Shape) -> Geometry:
    """The model's geometry with a mailbox just large enough for a shape. Raises ConfigError."""
    padded = config.mailbox.padded_heads if shape.heads == config.model.heads else None
    return replace(config.geometry(), heads=shape.heads, padded_heads=padded or shape.heads, capacity=shape.batch)
