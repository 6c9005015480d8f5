"""A checkpoint's document with made-up times, for tests of everything that reads one."""

from __future__ import annotations

import random
from typing import Any

ROUNDS = 31
PEERS = (
    ("own_local_route", "own", 5.0, 576, 96, "e"),
    ("triton_split_kv", "own", 10.3, 576, 96, "2"),
    ("flash_mla_sparse_decode", "public", 11.2, 656, 128, "e"),
    ("flash_mla_sparse_prefill", "public", 10.6, 1152, 128, "e"),
)


def statistics(microseconds: float, rounds: int = ROUNDS) -> dict[str, Any]:
    """Of a stage, with rounds that scatter by 1 %."""
    noise = random.Random(round(1000 * microseconds))
    times = [round(microseconds * noise.gauss(1, 0.01), 3) for _ in range(rounds)]
    ordered = sorted(times)
    return {
        "p50_us": ordered[rounds // 2],
        "p95_us": ordered[-2],
        "p99_us": ordered[-1],
        "samples": rounds,
        "rounds_us": times,
    }


def point(batch: int, keys: int, heads: int, l2: str, compared: bool = False) -> dict[str, Any]:
    """One entry of `points`; times grow linearly with every extent."""
    size = (0.5 + batch / 10) * (0.5 + keys / 512) * (0.5 + heads / 192) * (1.0 if l2 == "hot" else 1.1)
    skipped = {"name": "torch", "kind": "public", "p50_us": None, "error": None, "bytes_per_key": 576}
    return {
        "batch": batch,
        "heads": heads,
        "keys": keys,
        "l2": l2,
        "mode": "solo",
        "variant": f"sparse_b{batch}_h{heads}_push_t1",
        "stages": {
            name: statistics(time * size)
            for name, time in (("query_push", 1.5), ("sparse_decode", 5.0), ("merge", 1.4), ("chain", 8.0))
        },
        "peers": [
            {
                "name": name, "kind": kind, **statistics(time * size), "error": 0.002, "bytes_per_key": width,
                "heads_padded_to": padded, "lse_base": base, "skipped": None,
            }
            for name, kind, time, width, padded, base in PEERS
        ] + [skipped | {"heads_padded_to": None, "lse_base": "e", "skipped": "torch <is> not installed"}]
        if compared
        else [],
        "floors": {
            "launch": statistics(0.7),
            "launch_no_pdl": statistics(0.9),
            "chain_launch": statistics(1.6),
            "bytes": {"p50_us": 0.3 * size},
            "dependent_loads": {"p50_us": 1.2},
            "wire": {"p50_us": 1.5},
        },
    }  # fmt: skip


def document() -> dict[str, Any]:
    """A whole document as `dcp-decode checkpoint` writes it."""
    shapes = [(5, 256, 96, True), (1, 256, 96, True), (3, 256, 96, False), (5, 64, 96, False), (5, 2048, 96, False)]
    sweep = [
        {
            "batch": 5, "heads": 96, "keys": 256, "l2": l2, "variant": name, "default": name == "t1",
            "pdl": name != "t1_nopdl", **statistics(time),
        }
        for l2 in ("hot", "cold")
        for name, time in (("t1", 5.0), ("t2", 4.0), ("t1_nopdl", 3.0))
    ]  # fmt: skip
    step = {"batch": 5, "heads": 96, "keys": 256, "l2": "hot", "stage": "chain", "layers": 24}
    step |= {"layer_p50_us": 8.0, "allowed_us": 201.6}
    return {
        "schema": 1,
        "command": "checkpoint",
        "config": {
            "model": {"layers": 24, "heads": 96, "topk": 2048},
            "service": {"draft_tokens": 4},
            "parallel": {"dcp": 8},
        },
        "seed": 1,
        "commit": "0123456789abcdef",
        "dirty": False,
        "ranks": 8,
        "mode": "solo",
        "profile": "full",
        "device": {"name": "NVIDIA H200", "driver": "580.0", "architecture": "sm_90", "clocks": None},
        "versions": {"python": "3.12.3", "torch": "2.11.0"},
        "verified": True,
        "failures": [],
        "worst_error": 0.0252,
        "error_bound": 0.0286,
        "digest": "ab" * 32,
        "points": [point(*shape[:3], l2, shape[3]) for shape in shapes for l2 in ("hot", "cold")],
        "step": [step | statistics(195.0) | {"within": True}],
        "sweep": sweep,
        "layout": [
            {"batch": 5, "heads": 96, "keys": 256, "variant": "t2", "us": 8.0, "default_us": 10.0},
        ],
        "platform": {"copy_terabytes_per_second": 4.2, "l2_load_ns": 270.0, "memory_load_ns": 700.0, "clocks": [None]},
        "peer_facts": [{"name": name, "combine": "included"} for name, *_ in PEERS],
        "wire": {"query_us": 0.74, "value_us": 0.76, "source": "measured elsewhere"},
    }
