"""The gather warps of the exchange of probabilities: whole rows of the CTA's own keys, and its columns of all keys.

    keys     row of 576 bytes, one bulk copy a lane        own keys of the round, 64
    values   128 bytes, 8 lanes x 16-byte cp.async       all keys of the round, 256; zeros past the count

A round has a key and a value buffer; the warps run ahead as far as the compute warps have freed them. In the first
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
from dcp_decode.kernels import ptx
from dcp_decode.kernels.sparse_arguments import SparseArguments, Worker
from dcp_decode.kernels.sparse_chunk import SparseChunk
from dcp_decode.kernels.sparse_config import COMPUTE_WARPS
from dcp_decode.kernels.sparse_shared import CHUNK, COLUMNS, SPLIT

ROUND_KEYS = CHUNK * SPLIT
ROUND_BITS = ROUND_KEYS.bit_length() - 1
PIECE_BYTES = 16  # of one copy of value bytes
ROW_PIECES = COLUMNS // PIECE_BYTES
assert ROW_PIECES * SPLIT == 32


@dataclass(frozen=True)
class Share:
    """What one warp copies of the first round: keys of its CTA, and values where CTAs share the copies.

    before: keys and values of the warps of the other role, which come first.
    """

    keys: int
    values: int
    before: tuple[int, int] = (0, 0)


class SparseGather(SparseChunk):
    """Gather warps of `SparseDcpDecode`, and how rounds number their buffers."""

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
        shared_values = (ROUND_KEYS // groups - values) // warps if self.shares_copies else 0
        return Share((CHUNK // groups - keys) // warps, shared_values, (keys, values))

    def first_places(self, share: Share, worker: Worker) -> tuple[Any, Any]:
        """Position among the CTA's keys, and number among the row's, of the first that this warp copies."""
        groups = self.config.groups
        key, value = share.before[0] + worker.warp * share.keys, share.before[1] + worker.warp * share.values
        if groups == 1:
            return key, value
        group = worker.tile_group % groups
        return key + group * (CHUNK // groups), value + group * (ROUND_KEYS // groups)

    @cute.jit
    def meet_peers(self) -> None:
        """The barriers of the peers are initialised; then arrive for the second time: see `compute_partials`."""
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def gather(self, arguments: SparseArguments, worker: Worker) -> None:
        """A gather warp: its part of the first keys, then the values and all keys of every round.

        worker.thread and worker.warp count among the gather threads.
        """
        config = self.config
        share = self.gather_share
        first_key, first_value = self.first_places(share, worker)
        index = self.load_index(arguments, worker, Int32(0), first_key, share.keys)
        rows = cute.make_rmem_tensor(self.value_keys // 32, Int32)
        if cutlass.const_expr(self.shares_copies):
            rows[0] = self.load_shared_row(first_value, arguments, worker)
        else:
            self.load_value_rows(rows, Int32(0), arguments, worker)
        count = self.load_count(arguments, worker)
        self.meet_peers()
        keys = self.keys_of_cta(count, worker)
        self.gather_keys(index, Int32(0), keys, first_key, share.keys, arguments, worker, self.shares_copies)
        if count > 0:
            if cutlass.const_expr(self.shares_copies):
                self.gather_shared_values(rows[0], first_value, share.values, count, arguments, worker)
                self.expect_shared_values(count, worker)
            else:
                self.gather_values(rows, Int32(0), count, arguments, worker)
        chunk_rows = CHUNK // config.gather_warps
        for following in cutlass.range(((count + (ROUND_KEYS - 1)) >> ROUND_BITS) - 1, unroll=1):
            number = following + 1
            left = keys - number * CHUNK
            row_index = self.load_index(arguments, worker, number, worker.warp * chunk_rows, chunk_rows)
            self.load_value_rows(rows, number, arguments, worker)
            buffer = self.buffer(number)
            freed = self.phase(number) ^ 1
            if number >= config.buffers:
                # The compute warps are done with the keys of the round that had this buffer.
                ptx.wait_barrier(worker.shared + config.probabilities_layout.keys_free_barrier(0) + buffer * 8, freed)
            if left > 0:
                if worker.thread == 0:
                    self.expect_keys(number, left, worker)
                self.gather_keys(row_index, number, left, worker.warp * chunk_rows, chunk_rows, arguments, worker)
            if number >= config.buffers:
                ptx.wait_barrier(worker.shared + config.probabilities_layout.values_free_barrier(0) + buffer * 8, freed)
            self.gather_values(rows, number, count, arguments, worker)

    @property
    def value_keys(self) -> int:
        """Keys of a round whose values one gather warp copies."""
        return ROUND_KEYS // self.config.gather_warps

    def load_value_rows(self, rows: Any, number: Any, arguments: SparseArguments, worker: Worker) -> None:
        """Flat cache rows of this lane's share of the keys whose values this warp copies in round `number`."""
        for turn in range(self.value_keys // 32):
            key = number * ROUND_KEYS + worker.warp * self.value_keys + turn * 32 + worker.lane
            # The tail of the list is -1: never read, but a valid address.
            rows[turn] = ptx.maximum_int32(self.load_row_number(arguments, worker, key), Int32(0))

    def gather_values(self, rows: Any, number: Any, count: Any, arguments: SparseArguments, worker: Worker) -> None:
        """Start the copies of this CTA's columns of a warp's keys, four a step; keys past the count become zeros."""
        layout = self.config.probabilities_layout
        buffer = self.buffer(number)
        cta = worker.lane // ROW_PIECES
        piece = worker.lane % ROW_PIECES * PIECE_BYTES
        left = count - number * ROUND_KEYS - worker.warp * self.value_keys - cta
        base = worker.shared + layout.values + buffer * layout.value_bytes + piece
        base = base + (cta * CHUNK + worker.warp * (self.value_keys // SPLIT)) * layout.value_pitch
        source = arguments.kv + Int64(worker.split * COLUMNS + piece)
        for step in range(self.value_keys // SPLIT):
            row = cute.arch.shuffle_sync(rows[step // 8], step % 8 * SPLIT + cta)
            bytes_present = ptx.select_less_int32(Int32(step * SPLIT), left, PIECE_BYTES, 0)
            place = base + step * layout.value_pitch
            ptx.copy_async(place, source + Int64(row) * numerics.ROW_BYTES, bytes_present)
        cute.arch.cp_async_mbarrier_arrive_noinc(worker.barriers + (layout.value_barrier(0) // 8 + buffer))

    def load_shared_row(self, first: Any, arguments: SparseArguments, worker: Worker) -> Any:
        """Flat cache row of key `first` + lane of the row, whose values this lane copies for all that share."""
        if not self.shares_copies:
            return Int32(0)
        # The tail of the list is -1: never read.
        return self.load_row_number(arguments, worker, first + worker.lane)

    def value_line(self, key: Any) -> Any:
        """Line of the value buffer for a key of the round: those of one CTA are adjacent."""
        return key % SPLIT * CHUNK + key // SPLIT

    @cute.jit
    def gather_shared_values(
        self,
        row: Int32,
        first: Int32,
        width: cutlass.Constexpr,
        count: Int32,
        arguments: SparseArguments,
        worker: Worker,
    ) -> None:
        """Start this warp's shared copies of values, `width` lanes; row, first: `load_shared_row`'s."""
        layout = self.config.probabilities_layout
        key = first + worker.lane
        if cutlass.const_expr(width > 0):  # noqa: SIM102 (a static and a dynamic condition)
            if (worker.lane < width) & (key < count):
                self.bulk_copy(
                    worker.shared + layout.values + self.value_line(key) * layout.value_pitch,
                    arguments.kv + Int64(row) * numerics.ROW_BYTES + Int64(worker.split * COLUMNS),
                    COLUMNS,
                    worker.shared + layout.value_barrier(0),
                    worker,
                    shared=True,
                )

    @cute.jit
    def expect_shared_values(self, count: Int32, worker: Worker) -> None:
        """The gather threads of each CTA: zeros for the keys past the count, and what its barrier waits for."""
        layout = self.config.probabilities_layout
        present = ptx.minimum_int32(count, Int32(ROUND_KEYS))
        threads = 32 * self.config.gather_warps
        zero = Int32(0)
        for turn in cutlass.range_constexpr(ROUND_KEYS // threads):
            key = worker.thread + turn * threads
            if key >= present:
                place = worker.shared + layout.values + self.value_line(key) * layout.value_pitch
                for piece in cutlass.range_constexpr(ROW_PIECES):
                    ptx.store_shared(place + piece * PIECE_BYTES, [zero, zero, zero, zero])
        barrier = worker.barriers + layout.value_barrier(0) // 8
        if worker.thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, present * COLUMNS)
        else:
            cute.arch.mbarrier_arrive(barrier)

    def buffer(self, number: Any) -> Any:
        """Key and value buffer of a round."""
        return number & (self.config.buffers - 1)

    def phase(self, number: Any) -> Any:
        """Parity of the phase in which a round's barriers complete."""
        return (number >> (self.config.buffers - 1)) & 1
