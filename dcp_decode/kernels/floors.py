"""Kernels that do nothing but what no kernel can avoid: starting, and waiting for one load after another.

`EmptyKernel` has the grid, cluster, threads and shared memory of a real kernel: what a launch costs. `ChaseKernel` is
one thread that follows a chain of int64 addresses: what a load costs whose address is another load's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute

from dcp_decode.kernels import disk_cache, memory


@dataclass(frozen=True)
class EmptyConfig:
    """The launch of the kernel that is imitated; shared_bytes: dynamic shared memory of a CTA."""

    grid: tuple[int, int, int]
    threads: int
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    pdl: bool = True


class EmptyKernel:
    """Waits for the kernel before (if launched dependently) and ends."""

    def __init__(self, config: EmptyConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, unused: Int32, stream: cuda.CUstream) -> None:
        config = self.config
        self.kernel().launch(
            grid=config.grid,
            block=[config.threads, 1, 1],
            cluster=list(config.cluster),
            smem=config.shared_bytes,
            use_pdl=config.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()


@dataclass(frozen=True)
class ChaseConfig:
    """loads: length of the chain."""

    loads: int


class ChaseKernel:
    """One thread: address = *address, `loads` times; the last one is stored, so that no load can be left out."""

    def __init__(self, config: ChaseConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, first: Int64, result: Int64, stream: cuda.CUstream) -> None:
        self.kernel(first, result).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, first: Int64, result: Int64) -> None:
        address = first
        for _ in cutlass.range(self.config.loads, unroll=1):
            address = memory.load_global_int64(address)
        memory.store_global_int64(result, address)


@cache
def compile_empty(config: EmptyConfig) -> disk_cache.JitKernel:
    """Called with (0, stream)."""
    return disk_cache.compile_kernel(EmptyKernel(config), (Int32(0),))


@cache
def compile_chase(config: ChaseConfig) -> disk_cache.JitKernel:
    """Called with (address of the first int64, address of an int64 result, stream)."""
    return disk_cache.compile_kernel(ChaseKernel(config), (Int64(0), Int64(0)))
