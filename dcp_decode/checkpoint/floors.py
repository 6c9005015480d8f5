"""What no kernel can undercut on this GPU, measured in the same run: bandwidth, launches, dependent loads, a gather.

Of a point: `launch`, `launch_no_pdl` (empty kernel with the sparse decode's own grid, cluster, threads and shared
memory, with and without programmatic dependent launch), `chain_launch` (three such, as the chain) and `gather` (Triton:
reads the indices, gathers the rows, writes as many bytes as the partial rows) are timed like any stage. Formed from
measured parts: `bytes` (compulsory bytes of the sparse decode over copy bandwidth), `dependent_loads` (launch, then row
number -> key, each a load that waits for the one before) and, in no time measured on one GPU, `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.inputs import L2Eviction
from dcp_decode.checkpoint.points import Shape
from dcp_decode.checkpoint.ranks import BenchRanks, current_stream
from dcp_decode.checkpoint.timing import Stopwatch, Subject
from dcp_decode.checkpoint.wire import wire_of
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.configs import QueryConfig, ValueConfig
from dcp_decode.kernels.floors import ChaseConfig, EmptyConfig, compile_chase, compile_empty
from dcp_decode.kernels.sparse_layout import DecodeConfig

COPY_BYTES = 1 << 30
COPIES = 9
CHASE_LOADS = 4096
CHASE_STRIDE = 16  # int64: one 128-byte line a load
HOT_LINES, COLD_LINES = 1 << 14, 1 << 23  # 2 MB in L2, 1 GB in memory
GATHER_TILES = ((4, 1), (8, 1), (8, 2), (16, 4))  # (keys of a program, warps): the best of a wide search on an H200
DEPENDENT_LOADS = 2  # row number, key


@dataclass(frozen=True)
class Platform:
    """Measured once: copy bandwidth (bytes read plus written), and nanoseconds of a dependent load by where it hits."""

    copy_terabytes_per_second: float
    l2_load_ns: float
    memory_load_ns: float

    def load_us(self, l2: str) -> float:
        return (self.l2_load_ns if l2 == "hot" else self.memory_load_ns) * 1e-3


def measure_platform(eviction: L2Eviction) -> Platform:
    """Takes 2 GB of device memory for a moment."""
    return Platform(_copy_bandwidth(), _chase_ns(HOT_LINES, None), _chase_ns(COLD_LINES, eviction))


def compulsory_bytes(geometry: Geometry, shape: Shape) -> int:
    """Bytes that the sparse decode must move once: keys, row numbers, query, partial rows and LSE."""
    keys = shape.batch * shape.keys * (numerics.ROW_BYTES + 4)
    heads = shape.batch * geometry.heads
    return keys + heads * (numerics.ROW_BYTES + 2 * numerics.LATENT_DIM + 4)


def floor_subjects(ranks: BenchRanks, config: DecodeConfig) -> list[Subject]:
    """Empty launches as of `config` and its chain."""
    g, batch = ranks.geometry, ranks.batch
    query, value = QueryConfig(g, batch), ValueConfig(g, batch, config.push)
    chain = [
        EmptyConfig(query.grid, query.threads),
        _empty(config, True),
        EmptyConfig((g.owner_heads, batch, 1), value.threads),
    ]

    def subject(name: str, configs: Sequence[EmptyConfig]) -> Subject:
        kernels = [compile_empty(one) for one in configs]

        def launch(_layer: int) -> None:
            for kernel in kernels:
                kernel(0, current_stream())

        return Subject(name, launch)

    return [
        subject("launch", [_empty(config, True)]),
        subject("launch_no_pdl", [_empty(config, False)]),
        subject("chain_launch", chain),
    ]


def fastest_gather(ranks: BenchRanks, stopwatch: Stopwatch, samples: int) -> Subject | None:
    """The gather in its fastest shape at this point; None without Triton."""
    try:
        from dcp_decode.checkpoint import triton_kernels
    except ImportError:
        return None
    import triton

    problem, g, batch = ranks.problem, ranks.geometry, ranks.batch
    rows = torch.empty((batch, g.heads, numerics.LATENT_DIM // 2), dtype=torch.int32, device="cuda")
    cache = problem.caches.e4m3.view(torch.int32)

    def subject(block: int, warps: int, pdl: bool) -> Subject:
        parts = problem.shape.keys // block
        head_block = triton.next_power_of_2(-(-g.heads // parts))

        def launch(layer: int) -> None:
            triton_kernels.gather_rows[(batch, parts)](
                problem.part_of(cache, layer), problem.indices_of(layer), rows, problem.shape.keys,
                HEADS=g.heads, BLOCK=block, HEAD_BLOCK=head_block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
            )  # fmt: skip

        return Subject(f"gather {block} {warps} {pdl}", launch, ranks.prepare_eviction)

    tried = [subject(block, warps, True) for block, warps in GATHER_TILES if problem.shape.keys % block == 0]
    if not tried:
        return None
    times = stopwatch.measure(tried, samples, seed=0)
    best = min(tried, key=lambda one: times[one.name].p50)
    return Subject("gather", best.launch, best.prepare)


def modelled_floors(
    geometry: Geometry, shape: Shape, l2: str, platform: Platform, launch_us: float
) -> dict[str, dict[str, float]]:
    """Floors that are formed from measured parts, in microseconds."""
    bytes_us = compulsory_bytes(geometry, shape) / (platform.copy_terabytes_per_second * 1e6)
    return {
        "bytes": {"p50_us": bytes_us},
        "dependent_loads": {"p50_us": launch_us + DEPENDENT_LOADS * platform.load_us(l2)},
        "wire": {"p50_us": wire_of(geometry, shape.batch).layer_us},
    }


def describe_platform(platform: Platform) -> dict[str, Any]:
    """As the document has it, with the GPU's own figures."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return asdict(platform) | {
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }


def _empty(config: DecodeConfig, pdl: bool) -> EmptyConfig:
    return EmptyConfig(config.grid, config.threads, config.cluster, config.shared_bytes, pdl)


def _copy_bandwidth() -> float:
    """Terabytes a second, read and written, of a large copy that runs eagerly (a captured copy is slower)."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = sorted(_milliseconds(lambda: target.copy_(source)) for _ in range(COPIES))
    return 2 * COPY_BYTES / (milliseconds[COPIES // 2] * 1e-3) / 1e12


def _chase_ns(lines: int, eviction: L2Eviction | None) -> float:
    """Nanoseconds of one of CHASE_LOADS dependent loads over random lines of a table."""
    table = torch.zeros(lines, CHASE_STRIDE, dtype=torch.int64, device="cuda")
    order = torch.randperm(lines, device="cuda")[: CHASE_LOADS + 1]
    table[order[:-1], 0] = table.data_ptr() + order[1:] * (CHASE_STRIDE * 8)
    result = torch.zeros(1, dtype=torch.int64, device="cuda")
    kernel = compile_chase(ChaseConfig(CHASE_LOADS))
    first = table.data_ptr() + int(order[0]) * CHASE_STRIDE * 8
    times = []
    for _ in range(5):
        if eviction is not None:
            eviction.enqueue()
        times.append(_milliseconds(lambda: kernel(first, result.data_ptr(), current_stream())))
    assert int(result) == table.data_ptr() + int(order[-1]) * CHASE_STRIDE * 8, "the chain was not followed to its end"
    return sorted(times)[len(times) // 2] * 1e6 / CHASE_LOADS


def _milliseconds(launch: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)
