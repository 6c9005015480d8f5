"""The top-k exchange of a layer: every rank's candidate keys to every rank, as two kernels over the top-k mailbox.

    push      candidates int64 [B, K] --16-byte stores--> D x topk[generation, rank, :B]
    receive   own topk[generation, D, :B] --wait word by word--> private int64 [D, B, K], re-armed by the same thread

A key is two 32-bit words, neither of them ever an armed word (`topk.py`). Both kernels read stage TOPK's use counter;
stage QUERY, which comes next, increments it. What is done with the lists is exact integer work on one rank and needs
no exchange: `topk.selected_by_rank`, in torch.

At B = 5 and K = 2048 a rank pushes 82 KB to each peer; the work is B * K / 2 pieces of 16 bytes a peer. An odd K makes
rows that are no multiple of 16 bytes: they move word by word.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import arrival, disk_cache, memory
from dcp_decode.kernels.configs import ExchangeConfig
from dcp_decode.mailbox import MailboxLayout, Stage

ARMED = numerics.ARMED_WORD & 0xFFFFFFFF
NO_HEAD = -1  # the top-k mailbox has no heads


class TopkPush:
    """This rank's candidates into every rank's mailbox; a grid column a peer."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.config = config
        self.layout = MailboxLayout(config.geometry)

    @cute.jit
    def __call__(self, region: Int64, table: Int64, rank: Int32, candidates: Int64, stream: cuda.CUstream) -> None:
        """Launch; addresses as integers, see `launch.run_topk_push`."""
        self.kernel(region, table, rank, candidates).launch(
            grid=self.config.grid, block=[self.config.threads, 1, 1], use_pdl=self.config.pdl, stream=stream
        )

    @cute.kernel
    def kernel(self, region: Int64, table: Int64, rank: Int32, candidates: Int64) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, peer, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        piece = block * config.threads + thread
        use = arrival.read_use(region, int(Stage.TOPK))
        aborted = arrival.read_abort(region)
        if piece < config.pieces:
            offset = Int64(piece) * (4 * config.piece_words)
            words = _load_ordinary(candidates + offset, config.piece_words)
            base = memory.load_global_int64(table + Int64(peer) * 8)
            # Orders what this rank's earlier stages read and re-armed (this mailbox's words of the use before among
            # them) before these pushes: a peer that sees them may push to those places again.
            cute.arch.fence_acq_rel_sys()
            # A rank that gave up must not overwrite words that a slow peer has yet to read.
            if aborted == 0:
                _store(base + self.layout.topk.offset + _slot_bytes(config, use, rank) + offset, words)


class TopkReceive:
    """All ranks' candidates out of the own mailbox, once they have arrived; a grid column a source."""

    def __init__(self, config: ExchangeConfig) -> None:
        self.config = config
        self.layout = MailboxLayout(config.geometry)

    @cute.jit
    def __call__(self, region: Int64, rank: Int32, received: Int64, deadline: Int64, stream: cuda.CUstream) -> None:
        """Launch; addresses as integers, see `launch.run_topk_receive`."""
        self.kernel(region, rank, received, deadline).launch(
            grid=self.config.grid, block=[self.config.threads, 1, 1], use_pdl=self.config.pdl, stream=stream
        )

    @cute.kernel
    def kernel(self, region: Int64, rank: Int32, received: Int64, deadline: Int64) -> None:
        config = self.config
        count = config.piece_words
        thread, _, _ = cute.arch.thread_idx()
        block, source, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        piece = block * config.threads + thread
        use = arrival.read_use(region, int(Stage.TOPK))
        if piece < config.pieces:
            offset = Int64(piece) * (4 * count)
            place = region + self.layout.topk.offset + _slot_bytes(config, use, source) + offset
            row = piece // config.row_pieces
            words = cute.make_rmem_tensor(count, Uint32)
            first = _load_system(place, count)
            for element in cutlass.range_constexpr(count):
                words[element] = first[element]
            aborted = arrival.wait_words(
                words,
                place,
                region,
                rank,
                use,
                deadline,
                int(Stage.TOPK),
                source,
                row,
                Int32(NO_HEAD),
                (piece - row * config.row_pieces) * count,
                count,
            )
            if aborted == 0:
                # This thread is the word's only reader, and has it.
                _store(place, [Uint32(ARMED)] * count)
                target = received + (Int64(source) * config.pieces + Int64(piece)) * (4 * count)
                memory.store_global(target, [words[element] for element in range(count)])
        # Orders the reads of arrived words and their re-arming before whatever later stages of this rank push.
        cute.arch.fence_acq_rel_sys()


def _slot_bytes(config: ExchangeConfig, use: Any, source: Any) -> Any:
    """Byte offset in the top-k mailbox of a source's list in the use's generation."""
    g = config.geometry
    return Int64(use % g.generations * g.dcp + source) * (g.capacity * g.topk * 8)


def _load_ordinary(address: Any, count: int) -> list[Any]:
    return memory.load_global_words(address) if count == 4 else [Uint32(memory.load_global_int32(address))]


def _load_system(address: Any, count: int) -> list[Any]:
    return memory.load_words_system(address) if count == 4 else [memory.load_word_system(address)]


def _store(address: Any, words: list[Any]) -> None:
    if len(words) == 4:
        memory.store_words_system(address, words)
    else:
        memory.store_word_system(address, words[0])


@cache
def compile_topk_push(config: ExchangeConfig) -> disk_cache.JitKernel:
    """The compiled push of a configuration (cached)."""
    return disk_cache.compile_kernel(TopkPush(config), push_arguments())


@cache
def compile_topk_receive(config: ExchangeConfig) -> disk_cache.JitKernel:
    """The compiled receive of a configuration (cached)."""
    return disk_cache.compile_kernel(TopkReceive(config), receive_arguments())


def push_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled push, without the stream."""
    return (Int64(0), Int64(0), Int32(0), Int64(0))


def receive_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled receive, without the stream."""
    return (Int64(0), Int32(0), Int64(0), Int64(0))
