"""The gather warps of the exchange of probabilities: whole rows of the CTA's own keys, and its columns of all keys.

A round has one or two blocks, and of each:

    keys     row of 576 bytes, one bulk copy a lane        own keys of the block, 64
    values   128 bytes, 8 lanes x 16-byte cp.async       all keys of the block, 256; zeros past the count

A block has a key and a value buffer; the warps run ahead as far as the compute warps have freed them. In the first
round the compute warps copy most of the keys themselves: lanes of one warp issue bulk copies one after the other.

With two head groups a cluster, two CTAs need the same keys and values. In the first round each copies half of them, as
bulk copies to both; values then too, a slice a copy. Every CTA's barriers count all that it gets, and a copy may come
before its barrier expects it: the phase can't complete without the expecting arrival. Later rounds, whose buffers
would have to be free in both CTAs, are copied by each for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from dcp_decode import numerics
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import VALUE_STEP, SparseChunk
from dcp_decode.kernels.sparse_config import COMPUTE_WARPS
from dcp_decode.kernels.sparse_shared import BLOCK, COLUMNS, SPLIT

ROW_BLOCK = BLOCK * SPLIT  # keys of a row in one block of each CTA
ROW_STEP = VALUE_STEP * SPLIT  # and in one step
PIECE_BYTES = 16  # of one copy of value bytes
ROW_PIECES = COLUMNS // PIECE_BYTES
assert ROW_PIECES * SPLIT == 32


@dataclass(frozen=True)
class Share:
    """What one warp copies of a block of the first round: keys of its CTA, and values where CTAs share the copies.

    before: keys and values of the warps of the other role, which come first.
    """

    keys: int
    values: int
    before: tuple[int, int] = (0, 0)


class SparseGather(SparseChunk):
    """Gather warps of `SparseDcpDecode`, and what they share with the compute warps in the first round."""

    @property
    def shares_copies(self) -> bool:
        """Whether the CTAs of several head tiles copy the first round together, each row and slice once."""
        return self.config.groups > 1

    @property
    def compute_share(self) -> Share:
        """Of a compute warp: most of the keys that nobody shares, since the gather warps copy the values."""
        return Share(2, 8) if self.shares_copies else Share(5, 0)

    @property
    def gather_share(self) -> Share:
        """Of a gather warp: the rest."""
        groups, warps = self.config.groups, self.config.gather_warps
        keys, values = COMPUTE_WARPS * self.compute_share.keys, COMPUTE_WARPS * self.compute_share.values
        shared_values = (ROW_BLOCK // groups - values) // warps if self.shares_copies else 0
        return Share((BLOCK // groups - keys) // warps, shared_values, (keys, values))

    def first_places(self, share: Share, worker: Worker) -> tuple[Any, Any]:
        """Of a block: position among the CTA's keys, and number among the row's, of the first that this warp copies."""
        groups = self.config.groups
        key, value = share.before[0] + worker.warp * share.keys, share.before[1] + worker.warp * share.values
        if groups == 1:
            return key, value
        group = worker.tile_group % groups
        return key + group * (BLOCK // groups), value + group * (ROW_BLOCK // groups)

    def rounds(self, count: Any) -> Any:
        """Rounds of a row of `count` keys."""
        round_keys = ROW_BLOCK * self.config.blocks
        return (count + (round_keys - 1)) >> (round_keys.bit_length() - 1)

    @cute.jit
    def meet_peers(self) -> None:
        """The barriers of the peers are initialised; then arrive for the second time: see `compute_partials`."""
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()

    def load_first_index(self, first: Any, share: Share, arguments: SparseArguments, worker: Worker) -> list[Any]:
        """`load_index` of every block of the first round."""
        blocks = range(self.config.blocks)
        return [self.load_index(arguments, worker, Int32(block), first, share.keys) for block in blocks]

    def gather_first_keys(
        self, index: list[Any], first: Any, share: Share, keys: Any, arguments: SparseArguments, worker: Worker
    ) -> None:
        """Start this warp's copies of keys of the first round; index: `load_first_index`'s."""
        for block in range(self.config.blocks):
            left = keys - block * BLOCK
            self.gather_keys(index[block], Int32(block), left, first, share.keys, arguments, worker, self.shares_copies)

    @cute.jit
    def gather(self, arguments: SparseArguments, worker: Worker) -> None:
        """A gather warp: its part of the first keys, then the values and all keys of every round.

        worker.thread and worker.warp count among the gather threads.
        """
        config = self.config
        share = self.gather_share
        first_key, first_value = self.first_places(share, worker)
        index = self.load_first_index(first_key, share, arguments, worker)
        turns = self.value_keys // 32
        rows = [cute.make_rmem_tensor(turns, Int32) for _ in range(config.blocks)]
        for block in cutlass.range_constexpr(config.blocks):
            if cutlass.const_expr(self.shares_copies):
                rows[block][0] = self.load_shared_row(block, first_value, arguments, worker)
            else:
                self.load_value_rows(rows[block], Int32(block), arguments, worker)
        count = self.load_count(arguments, worker)
        self.meet_peers()
        keys = self.keys_of_cta(count, worker)
        self.gather_first_keys(index, first_key, share, keys, arguments, worker)
        for block in cutlass.range_constexpr(config.blocks):
            if count > block * ROW_BLOCK:
                if cutlass.const_expr(self.shares_copies):
                    self.gather_shared_values(rows[block][0], block, first_value, share, count, arguments, worker)
                    self.expect_shared_values(block, count, worker)
                else:
                    self.gather_values(rows[block], Int32(block), count, arguments, worker)
        for following in cutlass.range(self.rounds(count) - 1, unroll=1):
            self.gather_round(following + 1, rows, keys, count, arguments, worker)

    @cute.jit
    def gather_round(
        self,
        number: Int32,
        rows: list[cute.Tensor],
        keys: Int32,
        count: Int32,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """Keys of a later round, then its values: the compute warps free the values last."""
        config = self.config
        layout = config.probabilities_layout
        chunk_rows = BLOCK // config.gather_warps
        first = worker.warp * chunk_rows
        blocks = [number * config.blocks + block for block in range(config.blocks)]
        left = [keys - block * BLOCK for block in blocks]
        index = [self.load_index(arguments, worker, block, first, chunk_rows) for block in blocks]
        for turn in cutlass.range_constexpr(config.blocks):
            self.load_value_rows(rows[turn], blocks[turn], arguments, worker)
        for turn in cutlass.range_constexpr(config.blocks):
            block = blocks[turn]
            slot, freed = self.slot(block), self.phase(block) ^ 1
            if number >= config.buffers:
                # The compute warps are done with the keys of the block that had this buffer.
                memory.wait_barrier(worker.shared + layout.keys_free_barrier(0) + slot * 8, freed)
            if left[turn] > 0:
                if worker.thread == 0:
                    self.expect_keys(block, left[turn], worker)
                self.gather_keys(index[turn], block, left[turn], first, chunk_rows, arguments, worker)
        for turn in cutlass.range_constexpr(config.blocks):
            block = blocks[turn]
            slot, freed = self.slot(block), self.phase(block) ^ 1
            if number >= config.buffers:
                memory.wait_barrier(worker.shared + layout.values_free_barrier(0) + slot * 8, freed)
            self.gather_values(rows[turn], block, count, arguments, worker)

    @property
    def value_keys(self) -> int:
        """Keys of a block whose values one gather warp copies."""
        return ROW_BLOCK // self.config.gather_warps

    def load_value_rows(self, rows: Any, block: Any, arguments: SparseArguments, worker: Worker) -> None:
        """Flat cache rows of this lane's share of the keys whose values this warp copies in a block."""
        for turn in range(self.value_keys // 32):
            key = block * ROW_BLOCK + worker.warp * self.value_keys + turn * 32 + worker.lane
            # The tail of the list is -1: never read, but a valid address.
            rows[turn] = ptx.maximum_int32(self.load_row_number(arguments, worker, key), Int32(0))

    def gather_values(self, rows: Any, block: Any, count: Any, arguments: SparseArguments, worker: Worker) -> None:
        """Start the copies of this CTA's columns of a warp's keys, four a step; keys past the count become zeros."""
        layout = self.config.probabilities_layout
        slot = self.slot(block)
        cta = worker.lane // ROW_PIECES
        piece = worker.lane % ROW_PIECES * PIECE_BYTES
        left = count - block * ROW_BLOCK - worker.warp * self.value_keys - cta
        base = worker.shared + layout.values + slot * layout.value_bytes + piece
        base = base + (cta * BLOCK + worker.warp * (self.value_keys // SPLIT)) * layout.value_pitch
        source = arguments.kv + Int64(worker.split * COLUMNS + piece)
        for step in range(self.value_keys // SPLIT):
            row = cute.arch.shuffle_sync(rows[step // 8], step % 8 * SPLIT + cta)
            bytes_present = ptx.select_less_int32(Int32(step * SPLIT), left, PIECE_BYTES, 0)
            place = base + step * layout.value_pitch
            memory.copy_async(place, source + Int64(row) * numerics.ROW_BYTES, bytes_present)
        cute.arch.cp_async_mbarrier_arrive_noinc(worker.barriers + (layout.value_barrier(0) // 8 + slot))

    def load_shared_row(self, block: int, first: Any, arguments: SparseArguments, worker: Worker) -> Any:
        """Flat cache row of key `first` + lane of a block, whose values this lane copies for all that share."""
        if not self.shares_copies:
            return Int32(0)
        # The tail of the list is -1: never read.
        return self.load_row_number(arguments, worker, first + worker.lane + block * ROW_BLOCK)

    def shared_values(self, block: int, key: Any, worker: Worker) -> Any:
        """Address of the values of a key of a block of the first round: those of one CTA are adjacent."""
        layout = self.config.probabilities_layout
        line = key % SPLIT * BLOCK + key // SPLIT
        return worker.shared + (layout.values + block * layout.value_bytes) + line * layout.value_pitch

    @cute.jit
    def gather_shared_values(
        self,
        row: Int32,
        block: cutlass.Constexpr,
        first: Int32,
        share: cutlass.Constexpr,
        count: Int32,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """Start this warp's shared copies of values of a block of the first round; row, first: `load_shared_row`'s."""
        layout = self.config.probabilities_layout
        key = first + worker.lane
        if cutlass.const_expr(share.values > 0):  # noqa: SIM102 (a static and a dynamic condition)
            if (worker.lane < share.values) & (key < count - block * ROW_BLOCK):
                self.bulk_copy(
                    self.shared_values(block, key, worker),
                    arguments.kv + Int64(row) * numerics.ROW_BYTES + Int64(worker.split * COLUMNS),
                    COLUMNS,
                    worker.shared + layout.value_barrier(block),
                    worker,
                    shared=True,
                )

    @cute.jit
    def expect_shared_values(self, block: cutlass.Constexpr, count: Int32, worker: Worker) -> None:
        """The gather threads of each CTA: zeros for a block's keys past the count, and what its barrier waits for."""
        layout = self.config.probabilities_layout
        present = ptx.minimum_int32(count - block * ROW_BLOCK, Int32(ROW_BLOCK))
        threads = 32 * self.config.gather_warps
        zero = Int32(0)
        # A second block is used up to the last step that has keys.
        padded = Int32(ROW_BLOCK) if block == 0 else (present + (ROW_STEP - 1)) // ROW_STEP * ROW_STEP
        for key in cutlass.range(present + worker.thread // ROW_PIECES, padded, threads // ROW_PIECES, unroll=1):
            place = self.shared_values(block, key, worker) + worker.thread % ROW_PIECES * PIECE_BYTES
            memory.store_shared(place, [zero, zero, zero, zero])
        barrier = worker.barriers + layout.value_barrier(block) // 8
        if worker.thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, present * COLUMNS)
        else:
            cute.arch.mbarrier_arrive(barrier)
