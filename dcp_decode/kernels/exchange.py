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

from dataclasses import dataclass
from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_fake_stream

from dcp_decode import numerics
from dcp_decode.geometry import Geometry
from dcp_decode.kernels import arrival, ptx
from dcp_decode.mailbox import Mailbox, MailboxLayout, Stage

THREADS = 128
KEY_WORDS = 2
ARMED = numerics.ARMED_WORD & 0xFFFFFFFF
NO_HEAD = -1  # the top-k mailbox has no heads


@dataclass(frozen=True)
class ExchangeConfig:
    """Static choices: the geometry, the batch rows B (at most its capacity) and programmatic dependent launch."""

    geometry: Geometry
    batch: int
    pdl: bool = True

    @property
    def piece_words(self) -> int:
        """Words that a thread moves at once."""
        return 4 if self.geometry.topk % 2 == 0 else 1

    @property
    def row_pieces(self) -> int:
        return self.geometry.topk * KEY_WORDS // self.piece_words

    @property
    def pieces(self) -> int:
        """Pieces of one rank's list of all rows."""
        return self.batch * self.row_pieces

    @property
    def grid(self) -> tuple[int, int, int]:
        return ((self.pieces + THREADS - 1) // THREADS, self.geometry.dcp, 1)


class TopkPush:
    """This rank's candidates into every rank's mailbox; a grid column a peer."""

    def __init__(self, config: ExchangeConfig) -> None:
        _check_batch(config)
        self.config = config
        self.layout = MailboxLayout(config.geometry)

    @cute.jit
    def __call__(self, region: Int64, table: Int64, rank: Int32, candidates: Int64, stream: cuda.CUstream) -> None:
        """Launch; addresses as integers, see `run_topk_push`."""
        self.kernel(region, table, rank, candidates).launch(
            grid=self.config.grid, block=[THREADS, 1, 1], use_pdl=self.config.pdl, stream=stream
        )

    @cute.kernel
    def kernel(self, region: Int64, table: Int64, rank: Int32, candidates: Int64) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, peer, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        piece = block * THREADS + thread
        use = arrival.read_use(region, int(Stage.TOPK))
        aborted = arrival.read_abort(region)
        if piece < config.pieces:
            offset = Int64(piece) * (4 * config.piece_words)
            words = _load_ordinary(candidates + offset, config.piece_words)
            base = ptx.load_global_int64(table + Int64(peer) * 8)
            # Orders what this rank's earlier stages read and re-armed (this mailbox's words of the use before among
            # them) before these pushes: a peer that sees them may push to those places again.
            cute.arch.fence_acq_rel_sys()
            # A rank that gave up must not overwrite words that a slow peer has yet to read.
            if aborted == 0:
                _store(base + self.layout.topk.offset + _slot_bytes(config, use, rank) + offset, words)


class TopkReceive:
    """All ranks' candidates out of the own mailbox, once they have arrived; a grid column a source."""

    def __init__(self, config: ExchangeConfig) -> None:
        _check_batch(config)
        self.config = config
        self.layout = MailboxLayout(config.geometry)

    @cute.jit
    def __call__(self, region: Int64, rank: Int32, received: Int64, deadline: Int64, stream: cuda.CUstream) -> None:
        """Launch; addresses as integers, see `run_topk_receive`."""
        self.kernel(region, rank, received, deadline).launch(
            grid=self.config.grid, block=[THREADS, 1, 1], use_pdl=self.config.pdl, stream=stream
        )

    @cute.kernel
    def kernel(self, region: Int64, rank: Int32, received: Int64, deadline: Int64) -> None:
        config = self.config
        count = config.piece_words
        thread, _, _ = cute.arch.thread_idx()
        block, source, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        piece = block * THREADS + thread
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
                ptx.store_global(target, [words[element] for element in range(count)])
        # Orders the reads of arrived words and their re-arming before whatever later stages of this rank push.
        cute.arch.fence_acq_rel_sys()


def _slot_bytes(config: ExchangeConfig, use: Any, source: Any) -> Any:
    """Byte offset in the top-k mailbox of a source's list in the use's generation."""
    g = config.geometry
    return Int64(use % g.generations * g.dcp + source) * (g.capacity * g.topk * 8)


def _load_ordinary(address: Any, count: int) -> list[Any]:
    return ptx.load_global_words(address) if count == 4 else [Uint32(ptx.load_global_int32(address))]


def _load_system(address: Any, count: int) -> list[Any]:
    return ptx.load_words_system(address) if count == 4 else [ptx.load_word_system(address)]


def _store(address: Any, words: list[Any]) -> None:
    if len(words) == 4:
        ptx.store_words_system(address, words)
    else:
        ptx.store_word_system(address, words[0])


def _check_batch(config: ExchangeConfig) -> None:
    if not 1 <= config.batch <= config.geometry.capacity:
        raise ValueError(f"batch {config.batch} must be in 1 .. mailbox capacity {config.geometry.capacity}")


@cache
def compile_topk_push(config: ExchangeConfig) -> Any:
    """The compiled push of a configuration (cached)."""
    return cute.compile(TopkPush(config), *push_arguments(), make_fake_stream())


@cache
def compile_topk_receive(config: ExchangeConfig) -> Any:
    """The compiled receive of a configuration (cached)."""
    return cute.compile(TopkReceive(config), *receive_arguments(), make_fake_stream())


def push_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled push, without the stream."""
    return (Int64(0), Int64(0), Int32(0), Int64(0))


def receive_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled receive, without the stream."""
    return (Int64(0), Int32(0), Int64(0), Int64(0))


def run_topk_push(kernel: Any, mailbox: Mailbox, candidates: torch.Tensor, stream: int) -> None:
    """Launch on one rank's mailbox; returns without waiting.

    candidates: int64 [B, K], contiguous, on the GPU: this rank's local top-k. stream: CUDA stream handle.
    """
    kernel(
        Int64(mailbox.memory.local.data_ptr()),
        Int64(mailbox.memory.addresses.data_ptr()),
        Int32(mailbox.rank),
        Int64(candidates.data_ptr()),
        cuda.CUstream(stream),
    )


def run_topk_receive(
    kernel: Any, mailbox: Mailbox, received: torch.Tensor, deadline_nanoseconds: int, stream: int
) -> None:
    """Launch on one rank's mailbox; returns without waiting.

    received: int64 [D, B, K], contiguous, on the GPU: all ranks' candidates; left as it is where a wait expired.
    deadline_nanoseconds: of every wait. stream: CUDA stream handle.
    """
    kernel(
        Int64(mailbox.memory.local.data_ptr()),
        Int32(mailbox.rank),
        Int64(received.data_ptr()),
        Int64(deadline_nanoseconds),
        cuda.CUstream(stream),
    )
