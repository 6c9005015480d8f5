"""What racecheck knows of orders between the CTAs of a cluster: `racecheck_control.py ORDER`, under compute-sanitizer.

Two CTAs read rows that the first one copies to both (multicast), agree that all their warps have read them, and get the
next ones: what the head groups of the warpgroup decode do with their keys, and nothing else. They agree by an ORDER:

    mbarrier    every warp arrives at both CTAs' mbarriers (release at cluster scope), and waits for its own (acquire)
    cluster     the cluster barrier

Both are orders of PTX's memory model. On an H200 (CUDA 13.0) racecheck reports the first, every time, not the second.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint8, cute

from dcp_decode.kernels import disk_cache, memory

CTAS, WARPS, ROUNDS = 2, 16, 4
THREADS = 32 * WARPS
PIECE_BYTES = 512  # of a warp: 16 a lane
READ_BARRIER, PIECES = 8, 128  # offsets in shared memory; at 0 the mbarrier that counts the bytes of a round


@dataclass(frozen=True)
class ControlConfig:
    """order: how the CTAs agree that both have read a round's rows."""

    order: str


class Control:
    """ROUNDS x WARPS pieces of int32 through both CTAs; a thread stores the sum of the words that it has read."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, pieces: Int64, sums: Int64, stream: cuda.CUstream) -> None:
        self.kernel(pieces, sums).launch(
            grid=[CTAS, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CTAS, 1, 1],
            smem=PIECES + WARPS * PIECE_BYTES,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, pieces: Int64, sums: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        memory = cute.arch.get_dyn_smem(Uint8, alignment=128)
        barriers = cute.recast_ptr(memory, dtype=Int64)
        shared = Int32(memory.toint())
        if thread == 0:
            cute.arch.mbarrier_init(barriers, 1)
            cute.arch.mbarrier_init(barriers + READ_BARRIER // 8, CTAS * WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        total = Int32(0)
        for number in cutlass.range_constexpr(ROUNDS):
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barriers, WARPS * PIECE_BYTES)
            if (cta == 0) & (thread % 32 == 0):
                source = pieces + Int64(number * WARPS + warp) * PIECE_BYTES
                everywhere = Int32((1 << CTAS) - 1)
                memory.bulk_multicast(shared + PIECES + warp * PIECE_BYTES, source, PIECE_BYTES, shared, everywhere)
            memory.wait_barrier(shared, number % 2)
            # Another warp's piece.
            for word in memory.load_matrices(shared + PIECES + (thread + 32) % THREADS * 16, 4):
                total = total + Int32(word)
            self.agree(thread % 32, shared, number)
        memory.store_global_int64(sums + Int64(cta * THREADS + thread) * 8, Int64(total))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def agree(self, lane: Int32, shared: Int32, number: cutlass.Constexpr) -> None:
        """This warp has read its piece: wait until all warps of both CTAs have."""
        if cutlass.const_expr(self.config.order == "mbarrier"):
            cute.arch.sync_warp()
            if lane < CTAS:
                memory.arrive_cluster(memory.map_shared(shared + READ_BARRIER, lane))
            memory.wait_cluster_barrier(shared + READ_BARRIER, number % 2)
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def main() -> None:
    import torch

    kernel = disk_cache.compile_kernel(Control(ControlConfig(sys.argv[1])), (Int64(0), Int64(0)))
    pieces = torch.randint(1 << 20, (ROUNDS, THREADS * 4), dtype=torch.int32, device="cuda")
    sums = torch.zeros(CTAS, THREADS, dtype=torch.int64, device="cuda")
    kernel(pieces.data_ptr(), sums.data_ptr(), torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.equal(sums.sum(1), pieces.sum().expand(CTAS))


if __name__ == "__main__":
    main()
