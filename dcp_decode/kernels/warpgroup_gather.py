"""Keys of the warpgroup decode: flat cache rows of 576 bytes into shared memory, an mbarrier a tile of 64 keys.

A row is one bulk copy, started by a lane of a compute warp; lanes of a warp start theirs in turn, so the keys are dealt
to the warps and the first tiles are there first. The bulk copies of a multiprocessor start 17 cycles apart, and L2
delivers some 2.7 KB a cycle to all of them: with S = 1 every head group of a row would read 147 KB of the same keys.
So the head groups of a cluster start a share of the copies each, and each copy goes to all of them:

    cluster (S, groups)    CTA (s, 0)   CTA (s, 1)   CTA (s, 2)      key i of a chunk is started by CTA (s, i % groups)
    keys of split s           all          all          all          and counted by the mbarriers of all

Every CTA expects all bytes of its chunk on its own mbarriers. Before the first copy the cluster barrier has shown that
the peers' mbarriers are initialised; before a later chunk's copies the head groups tell each other that they have read
the keys (`keys_free_barrier`). No CTA leaves before it has received all its keys.

Measured on an H200, 256 keys, groups of 1, 2 and 3: B = 8 (16 heads, 2 CTAs) 6.5, 5.8, 6.0 us, B = 16 (16 heads) 8.3,
7.2, 7.5; 5 rows of 1024 keys (16 heads, 4 CTAs), 1 and 2: 9.2, 8.1. Clusters that fit at once, a CTA a multiprocessor:
66 of 2 CTAs, 39 of 3, 30 of 4, 22 of 5, 17 of 6, 15 of 8; so B = 40 with 32 heads must do without (10.7 us; 18.4 in two
waves). Copies of 16 bytes (cp.async, a row a warp) instead of bulk copies: slower everywhere, 10.7 -> 11.9 us at
B = 40, 4.27 -> 4.30 at B = 1.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from dcp_decode import numerics
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_rows import SparseRows
from dcp_decode.kernels.sparse_shared import ROW_PITCH
from dcp_decode.kernels.warpgroup_config import COMPUTE_WARPS, WarpgroupConfig
from dcp_decode.kernels.warpgroup_shared import KEY_TILE

TILE_BITS = KEY_TILE.bit_length() - 1


class WarpgroupGather(SparseRows):
    """How the compute warps of `SparseWarpgroups` copy the keys of a chunk."""

    config: WarpgroupConfig

    @property
    def gathering_lanes(self) -> int:
        """Lanes of a compute warp that copy a key of a chunk."""
        return -(-self.config.chunk // (COMPUTE_WARPS * self.config.groups))

    def gathered_key(self, worker: Worker) -> Int32:
        """Key of a chunk that this lane gathers, perhaps past the chunk's end."""
        groups = self.config.groups
        return (worker.lane * COMPUTE_WARPS + worker.warp) * groups + worker.tile_group % groups

    @cute.jit
    def load_index(self, arguments: SparseArguments, worker: Worker, chunk: Int32) -> Int32:
        """Flat cache row of the key that this lane gathers in `chunk`; it may precede the count, not the list's end."""
        index = Int32(0)
        if worker.lane < self.gathering_lanes:
            key = worker.split + self.config.split * (chunk * self.config.chunk + self.gathered_key(worker))
            index = self.load_row_number(arguments, worker, key)
        return index

    @cute.jit
    def gather(self, index: Int32, left: Int32, arguments: SparseArguments, worker: Worker) -> None:
        """Start the copies of a chunk of which `left` > 0 keys are left."""
        layout = self.config.shared
        if worker.thread < layout.tiles:
            rows = ptx.minimum_int32(left - worker.thread * KEY_TILE, Int32(KEY_TILE))
            if rows > 0:
                barrier = worker.barriers + (layout.key_barrier(0) // 8 + worker.thread)
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * numerics.ROW_BYTES)
        key = self.gathered_key(worker)
        if key < ptx.minimum_int32(left, Int32(self.config.chunk)):
            place = worker.shared + layout.keys + key * ROW_PITCH
            barrier = worker.shared + layout.key_barrier(0) + (key >> TILE_BITS) * 8
            source = arguments.kv + Int64(index) * numerics.ROW_BYTES
            self.copy_key(place, source, barrier, worker)

    def copy_key(self, place: Int32, source: Int64, barrier: Int32, worker: Worker) -> None:
        """Start the copy of a key row, for all head groups of the cluster that attend to it."""
        config = self.config
        if config.groups > 1:
            ctas = Int32(sum(1 << config.split * group for group in range(config.groups))) << worker.split
            memory.bulk_multicast(place, source, numerics.ROW_BYTES, barrier, ctas)
        else:
            memory.bulk_load(place, source, numerics.ROW_BYTES, barrier)

    @cute.jit
    def await_free_keys(self, chunk: Int32, worker: Worker) -> None:
        """Tell the head groups that this CTA has read its keys of a chunk; wait until all of them have."""
        config = self.config
        if cutlass.const_expr(config.groups > 1):
            barrier = worker.shared + config.shared.keys_free_barrier
            if worker.thread < config.groups:
                memory.arrive_cluster(memory.map_shared(barrier, worker.split + config.split * worker.thread))
            memory.wait_cluster_barrier(barrier, chunk & 1)
