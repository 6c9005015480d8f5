"""The stages of one verify step of one layer, for one rank on a GPU: the kernels behind the interface of `CpuStages`.

    select_push -> select -> query_push -> sparse_decode -> [value_push ->] merge

Each method launches on the current CUDA stream and returns at once, so that a whole step can be captured in a graph.
Nothing is read back: an expired wait shows in the mailbox's abort word, which the caller reads once a step.
"""

from __future__ import annotations

import torch

from dcp_decode import numerics, topk
from dcp_decode.cpu.stages import LocalPartial
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.kernels.configs import ExchangeConfig, QueryConfig, ValueConfig
from dcp_decode.kernels.exchange import compile_topk_push, compile_topk_receive
from dcp_decode.kernels.launch import (
    run_query,
    run_sparse,
    run_topk_push,
    run_topk_receive,
    run_value,
    run_value_push,
)
from dcp_decode.kernels.query import compile_query
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.sparse_config import sparse_config, sparse_for
from dcp_decode.kernels.value import compile_value, compile_value_push
from dcp_decode.mailbox import Mailbox, Stage


class GpuStages:
    """One rank's stages on the device of its mailbox. push: the route. Raises UnsupportedEnvironment if refused."""

    def __init__(self, mailbox: Mailbox, deadline_seconds: float, push: bool) -> None:
        self.mailbox = mailbox
        self.geometry = mailbox.geometry
        self.rank = mailbox.rank
        self.push = push
        self.deadline_nanoseconds = int(deadline_seconds * 1e9)
        refusal = sparse_for(self.geometry, self.geometry.capacity, push)
        if refusal is not None:
            raise UnsupportedEnvironment(str(refusal))
        self._received: dict[int, torch.Tensor] = {}

    def prepare(self, batch: int) -> None:
        """Compile the kernels of a batch of B rows, and allocate what outlives a step: before the first use of B."""
        if batch in self._received:
            return
        g = self.geometry
        exchange = ExchangeConfig(g, batch)
        compile_topk_push(exchange)
        compile_topk_receive(exchange)
        compile_query(QueryConfig(g, batch))
        compile_sparse(sparse_config(g, batch, self.push))
        compile_value(ValueConfig(g, batch, self.push))
        if not self.push:
            compile_value_push(ValueConfig(g, batch, self.push))
        # What an expired wait leaves unwritten must still be candidates: positions that index a page table.
        self._received[batch] = torch.full(
            (g.dcp, batch, g.topk), topk.ABSENT, dtype=torch.int64, device=mailbox_device(self.mailbox)
        )

    def select_push(self, candidates: torch.Tensor) -> None:
        """Stage 0, first half: this rank's local top-k (int64 [B, K]) into every rank's mailbox."""
        kernel = compile_topk_push(ExchangeConfig(self.geometry, len(candidates)))
        run_topk_push(kernel, self.mailbox, candidates.contiguous(), _stream())

    def select(self, batch: int) -> torch.Tensor:
        """Stage 0, second half: this rank's share of the exact global top-k, positions int64 [B, K] as a prefix."""
        received = self._received[batch]
        kernel = compile_topk_receive(ExchangeConfig(self.geometry, batch))
        run_topk_receive(kernel, self.mailbox, received, self.deadline_nanoseconds, _stream())
        return topk.selected_by_rank(received, self.rank)

    def query_push(self, query: torch.Tensor) -> None:
        """Stage 1: own heads' query (BF16 [B, H, 576]) as E4M3 into every rank's query mailbox."""
        run_query(compile_query(QueryConfig(self.geometry, len(query))), self.mailbox, query.contiguous(), _stream())

    def sparse_decode_push(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
        """Stage 2, push route. cache: uint8 [N, 576]; rows: int32 [B, K], contiguous; valid: int32 [B]."""
        self._decode(cache, rows, valid, None)

    def sparse_decode_local(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> LocalPartial:
        """Stage 2, local route: latent rows and natural-log LSE stay here; heads of padding are not written."""
        shape = (len(valid), self.geometry.padded_heads)
        device = valid.device
        latent = torch.empty(*shape, numerics.LATENT_DIM, dtype=torch.bfloat16, device=device)
        partial = LocalPartial(latent, torch.empty(shape, dtype=torch.float32, device=device))
        self._decode(cache, rows, valid, partial)
        return partial

    def value_push(self, partial: LocalPartial) -> None:
        """Stage 3a, local route: push what stage 2 left, its LSE turned from natural to base 2."""
        kernel = compile_value_push(ValueConfig(self.geometry, len(partial.latent), self.push))
        run_value_push(kernel, self.mailbox, partial.latent, partial.lse_ln, _stream())

    def merge(self, batch: int, after: Stage) -> torch.Tensor:
        """Stage 3 (3b): merged rows BF16 [B, H, 512] of this rank's own heads. after: as the route has it."""
        assert (after == Stage.SPARSE) == self.push
        shape = (batch, self.geometry.owner_heads, numerics.LATENT_DIM)
        merged = torch.empty(shape, dtype=torch.bfloat16, device=mailbox_device(self.mailbox))
        kernel = compile_value(ValueConfig(self.geometry, batch, self.push))
        run_value(kernel, self.mailbox, merged, self.deadline_nanoseconds, _stream())
        return merged

    def _decode(
        self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, partial: LocalPartial | None
    ) -> None:
        if rows.shape[1] != self.geometry.topk or not rows.is_contiguous():
            raise ValueError(f"rows {tuple(rows.shape)} must be contiguous and {self.geometry.topk} wide")
        run_sparse(
            compile_sparse(sparse_config(self.geometry, len(valid), self.push)),
            self.mailbox,
            cache,
            rows,
            valid,
            None if partial is None else partial.latent,
            None if partial is None else partial.lse_ln,
            self.deadline_nanoseconds,
            _stream(),
        )


def mailbox_device(mailbox: Mailbox) -> torch.device:
    """The device that a rank's mailbox lies on."""
    return mailbox.memory.local.device


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
