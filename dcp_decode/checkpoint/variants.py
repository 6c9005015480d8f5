"""Kernel variants as data: which sparse decodes a sweep times, and what the winners say to `sparse_layout`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from dcp_decode.kernels.sparse_config import FAMILY, MAX_TILES, SparseConfig, can_implement


def swept_variants(default: SparseConfig) -> list[SparseConfig]:
    """Every variant worth timing where the layout chooses `default`, which comes first; the last is it without pdl."""
    tried = [
        replace(default, tiles=tiles, bulk=bulk, buffers=buffers)
        for tiles, bulk, buffers in product(range(1, MAX_TILES + 1), (False, True), (1, 2))
    ]
    allowed = [config for config in tried if can_implement(config) is None]
    return list(dict.fromkeys([default, *allowed, replace(default, pdl=False)]))


def family_of(config: SparseConfig) -> str:
    """The oracle's name for what decides the bits of a variant."""
    return getattr(config, "family", FAMILY)


def variant_name(config: SparseConfig) -> str:
    """Of a variant, for tables: unique among those of one geometry and batch."""
    return config.name if config.pdl else f"{config.name}_nopdl"


def best_layout(sweep: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fastest variant of each (batch, heads, keys) of sweep entries, by the sum of its hot and cold medians.

    Variants without dependent launch are for comparison only. us: that sum; default_us: the default layout's.
    """
    places: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for entry in sweep:
        place = places.setdefault((entry["batch"], entry["heads"], entry["keys"]), {})
        variant = place.setdefault(entry["variant"], {"us": 0.0, "default": entry["default"], "pdl": entry["pdl"]})
        variant["us"] += entry["p50_us"]
    return [
        {
            "batch": batch,
            "heads": heads,
            "keys": keys,
            "variant": min((name for name, one in place.items() if one["pdl"]), key=lambda name: place[name]["us"]),
            "us": min(one["us"] for one in place.values() if one["pdl"]),
            "default_us": next(one["us"] for one in place.values() if one["default"]),
        }
        for (batch, heads, keys), place in places.items()
    ]
