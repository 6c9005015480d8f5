"""Fills the shared memory of every SM with 0xFF, so that a kernel that reads what it did not write meets NaNs."""

from __future__ import annotations

from functools import cache

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Uint8, Uint32, cute
from cutlass.cute.runtime import make_fake_stream

from dcp_decode.kernels import memory

SHARED_BYTES = 227 * 1024 // 8192 * 8192
THREADS = 512
CTAS = 1056  # several waves: one CTA an SM at a time


@cute.kernel
def _poison_kernel():
    thread, _, _ = cute.arch.thread_idx()
    shared = Int32(cute.arch.get_dyn_smem(Uint8, alignment=1024).toint())
    word = Uint32(0xFFFFFFFF)
    for turn in cutlass.range_constexpr(SHARED_BYTES // (THREADS * 16)):
        memory.store_shared(shared + (turn * THREADS + thread) * 16, [word, word, word, word])


@cute.jit
def _poison_launch(stream: cuda.CUstream):
    _poison_kernel().launch(grid=[CTAS, 1, 1], block=[THREADS, 1, 1], smem=SHARED_BYTES, stream=stream)


@cache
def _compiled():
    return cute.compile(_poison_launch, make_fake_stream())


def poison_shared_memory(stream: int) -> None:
    """Enqueue the poison kernel on a CUDA stream handle."""
    _compiled()(cuda.CUstream(stream))
