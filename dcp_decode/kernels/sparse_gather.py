"""The gather warps of the exchange of probabilities: whole rows of the CTA's own keys, and its columns of all keys.

    keys     row of 576 bytes, one bulk copy a lane        own keys of the round, 64
    values   128 bytes, 8 lanes x 16-byte cp.async       all keys of the round, 256; zeros past the count

A round has a key and a value buffer; the warps run ahead as far as the compute warps have freed them. In the first
round the compute warps copy most of the keys themselves: lanes of one warp issue bulk copies one after the other.
"""

from __future__ import annotations

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
FIRST_ROWS = 5  # own keys of the first round that a compute warp copies; the gather warps copy the others
assert ROW_PIECES * SPLIT == 32


class SparseGather(SparseChunk):
    """Gather warps of `SparseDcpDecode`, and how rounds number their buffers."""

    @cute.jit
    def gather(self, arguments: SparseArguments, worker: Worker) -> None:
        """A gather warp: its part of the first keys, then the values and all keys of every round.

        worker.thread and worker.warp count among the gather threads.
        """
        config = self.config
        chunk_rows = CHUNK // config.gather_warps
        first_rows = (CHUNK - COMPUTE_WARPS * FIRST_ROWS) // config.gather_warps
        first = COMPUTE_WARPS * FIRST_ROWS + worker.warp * first_rows
        index = self.load_index(arguments, worker, Int32(0), first, first_rows)
        rows = cute.make_rmem_tensor(self.value_keys // 32, Int32)
        self.load_value_rows(rows, Int32(0), arguments, worker)
        count = self.load_count(arguments, worker)
        cute.arch.cluster_wait()
        cute.arch.cluster_arrive_relaxed()
        keys = self.keys_of_cta(count, worker)
        self.gather_keys(index, Int32(0), keys, first, first_rows, arguments, worker)
        if count > 0:
            self.gather_values(rows, Int32(0), count, arguments, worker)
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

    def buffer(self, number: Any) -> Any:
        """Key and value buffer of a round."""
        return number & (self.config.buffers - 1)

    def phase(self, number: Any) -> Any:
        """Parity of the phase in which a round's barriers complete."""
        return (number >> (self.config.buffers - 1)) & 1
