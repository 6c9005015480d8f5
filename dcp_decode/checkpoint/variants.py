"""Kernel variants as data: which sparse decodes a sweep times, and what the winners say to `sparse_layout`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dcp_decode.checkpoint.points import Shape
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_layout import DecodeConfig, decode_config, sparse_variants


def default_config(geometry: Geometry, shape: Shape, push: bool, architecture: str) -> DecodeConfig:
    """What the layout chooses for a shape: as in a model whose ranks may expect the shape's keys."""
    return decode_config(geometry, shape.batch, push, architecture, shape.keys)


def swept_variants(default: DecodeConfig, architecture: str, keys: int) -> list[DecodeConfig]:
    """Every variant worth timing where the layout chooses `default`, which comes first; the last is it without pdl."""
    others = sparse_variants(default.geometry, default.batch, default.push, architecture, keys)
    return list(dict.fromkeys([default, *others, replace(default, pdl=False)]))


def timed_alone(config: DecodeConfig) -> DecodeConfig:
    """The variant that is timed for the sparse decode alone: it lets the next one start at its end.

    Each fills the GPU, and one that started before would only wait. In a chain the next kernel is small, and the layout
    says when it starts.
    """
    return replace(config, trigger="end")


def variant_name(config: DecodeConfig) -> str:
    """Of a variant, for tables: unique among those of one geometry and batch."""
    return config.name if config.pdl else f"{config.name}_nopdl"


def best_layout(sweep: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fastest variant of each (batch, heads, keys) of sweep entries, by the sum of its hot and cold medians.

    A variant that lacks one of them failed there; those without dependent launch are for comparison only.
    us: that sum; default_us: the default layout's.
    """
    places: dict[tuple[int, int, int], dict[str, list[Mapping[str, Any]]]] = {}
    for entry in sweep:
        variants = places.setdefault((entry["batch"], entry["heads"], entry["keys"]), {})
        variants.setdefault(entry["variant"], []).append(entry)
    layout = []
    for (batch, heads, keys), variants in places.items():
        times = {name: sum(entry["p50_us"] for entry in timings) for name, timings in variants.items()}
        states = max(map(len, variants.values()))
        allowed = [name for name, timings in variants.items() if len(timings) == states and timings[0]["pdl"]]
        if allowed:
            best = min(allowed, key=times.__getitem__)
            default = next((times[name] for name in allowed if variants[name][0]["default"]), None)
            place = {"batch": batch, "heads": heads, "keys": keys}
            layout.append(place | {"variant": best, "us": times[best], "default_us": default})
    return layout
