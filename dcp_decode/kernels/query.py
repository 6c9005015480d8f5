"""DcpQuery: a rank's own query heads, quantized to E4M3, into every rank's query mailbox.

    query BF16 [B, H, 576] --x 1 / q_scale--> E4M3 --16-byte stores--> D x query[generation, row, rank * H + head]

The heads of a row are contiguous on both sides, so the work is B * H * 36 pieces of 16 bytes (32 of input). A thread
converts one piece and stores it to `peers_a_thread` ranks.

Measured (H200, solo, graph with programmatic dependent launch, B 5, 96 heads, D 8): 1.45 to 1.70 us, of which the fence
of contract section 5 takes 0.6 (0.89 without it). It is needed: protocol variant `no_fence_in_stage_1` is unsafe.
Tried: 128 threads x 2 peers 1.89, 64 x 8 1.83, 32 x 4 1.77 (more warps, more fences); the fence right after the
dependency wait 1.68; a system-scope load of the abort word before the fence cost 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute

from dcp_decode import numerics
from dcp_decode.geometry import Geometry
from dcp_decode.kernels import arrival, disk_cache, memory, ptx
from dcp_decode.kernels.configs import QUERY_PIECE_BYTES, QUERY_ROW_PIECES, QueryConfig
from dcp_decode.mailbox import MailboxLayout, Stage


class DcpQuery:
    """The kernel specialised for one `QueryConfig`."""

    def __init__(self, config: QueryConfig) -> None:
        self.config = config
        self.layout = MailboxLayout(config.geometry)
        self.pieces = QueryPieces(config.geometry)

    @cute.jit
    def __call__(
        self, region: Int64, table: Int64, rank: Int32, query: Int64, inverse_scale: Float32, stream: cuda.CUstream
    ) -> None:
        """Launch; addresses as integers, see `launch.run_query`."""
        self.kernel(region, table, rank, query, inverse_scale).launch(
            grid=self.config.grid, block=[self.config.threads, 1, 1], use_pdl=self.config.pdl, stream=stream
        )

    @cute.kernel
    def kernel(self, region: Int64, table: Int64, rank: Int32, query: Int64, inverse_scale: Float32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, group, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        piece = block * self.config.threads + thread
        # First loads: the use number, the abort word, the input and the peers' addresses don't depend on each other.
        use = arrival.read_use(region, int(Stage.QUERY))
        aborted = arrival.read_abort(region)
        if piece < self.config.pieces:
            loaded = self.pieces.load(query, piece)
            peers = self.config.peers_a_thread
            bases = [memory.load_global_int64(table + Int64(group * peers + peer) * 8) for peer in range(peers)]
            # Orders what the earlier stages of this stream read and re-armed (query words, LSE and payload words)
            # before these pushes: a peer that sees them may push to those places again.
            cute.arch.fence_acq_rel_sys()
            words = quantized(loaded, inverse_scale)
            offset = self.pieces.offset(use, rank, piece)
            # A rank that gave up must not overwrite words that a slow peer has yet to read.
            if aborted == 0:
                for peer in cutlass.range_constexpr(peers):
                    memory.store_words_system(bases[peer] + offset + self.layout.query.offset, words)
        if (block == 0) & (group == 0) & (thread == 0):
            # Last, or the fence would wait for it. The stages before are complete (dependency wait): stage 3 of the
            # use before (before the first use this brings -1 to 0), and this use's top-k exchange. Uses without one
            # skip a TOPK use on all ranks alike.
            arrival.advance_use(region, int(Stage.MERGE))
            arrival.advance_use(region, int(Stage.TOPK))


@dataclass(frozen=True)
class QueryPieces:
    """Where the 16-byte pieces of a rank's own heads lie: of one row, then of the next."""

    geometry: Geometry

    def load(self, query: Any, piece: Any) -> list[Any]:
        """The 16 BF16 values of a piece as 8 words. query: address of BF16 [B, H, 576]."""
        source = query + Int64(piece) * (2 * QUERY_PIECE_BYTES)
        return [*memory.load_global_words(source), *memory.load_global_words(source + 16)]

    def offset(self, use: Any, rank: Any, piece: Any) -> Any:
        """Byte offset of a piece of `rank` in every rank's query mailbox."""
        g = self.geometry
        row_pieces = g.owner_heads * QUERY_ROW_PIECES
        row = piece // row_pieces
        line = (Int64(use % g.generations) * g.capacity + Int64(row)) * g.padded_heads + Int64(rank) * g.owner_heads
        return line * numerics.ROW_BYTES + Int64(piece - row * row_pieces) * QUERY_PIECE_BYTES


def quantized(words: list[Any], inverse_scale: Any) -> list[Any]:
    """16 BF16 in 8 words as 16 E4M3 bytes in 4 words."""
    return [_quantized(words[first : first + 2], inverse_scale) for first in range(0, 8, 2)]


def _quantized(pair: list[Any], inverse_scale: Any) -> Any:
    """Four E4M3 bytes of the four BF16 in two words."""
    values = [*ptx.bf16_values(pair[0]), *ptx.bf16_values(pair[1])]
    return ptx.e4m3_word([ptx.multiply(value, inverse_scale) for value in values])


@cache
def compile_query(config: QueryConfig) -> disk_cache.JitKernel:
    """The compiled kernel of a configuration (cached)."""
    return disk_cache.compile_kernel(DcpQuery(config), example_arguments())


def example_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled kernel, without the stream: for compilation and export."""
    address = Int64(0)
    return (address, address, Int32(0), address, Float32(1.0))
