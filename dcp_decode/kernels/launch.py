"""Launches of the kernels on one rank's mailbox: tensors in, one call of a `Kernel`, no wait.

A kernel is anything that takes the arguments of its `__call__` as plain integers and floats, the stream last: a
function that the CuTe DSL has just compiled (`jit`), or one of a library built ahead of time (`aot`). So this module,
and a machine that only launches, needs no cutlass.

Common to all: mailbox is this rank's, on the GPU; its own region, the table of its peers' addresses and its rank are
the first arguments. deadline_nanoseconds bounds every wait of the kernel. stream is a CUDA stream handle.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dcp_decode import numerics
from dcp_decode.kernels.configs import KernelConfig
from dcp_decode.mailbox import Mailbox

Kernel = Callable[..., None]
# From the name of a kernel (`configs.stage_kernels`) and its configuration to the kernel on this process's GPU.
LoadKernel = Callable[[str, KernelConfig], Kernel]


def run_topk_push(kernel: Kernel, mailbox: Mailbox, candidates: torch.Tensor, stream: int) -> None:
    """candidates: int64 [B, K], contiguous, on the GPU: this rank's local top-k."""
    kernel(*_pushing(mailbox), candidates.data_ptr(), stream)


def run_topk_receive(
    kernel: Kernel, mailbox: Mailbox, received: torch.Tensor, deadline_nanoseconds: int, stream: int
) -> None:
    """received: int64 [D, B, K], contiguous, on the GPU: all ranks' candidates; as it was where a wait expired."""
    kernel(*_receiving(mailbox), received.data_ptr(), deadline_nanoseconds, stream)


def run_query(kernel: Kernel, mailbox: Mailbox, query: torch.Tensor, stream: int) -> None:
    """query: bf16 [B, H, 576], contiguous, this rank's own heads on the GPU."""
    kernel(*_pushing(mailbox), query.data_ptr(), numerics.reciprocal(mailbox.geometry.q_scale), stream)


def run_sparse(
    kernel: Kernel,
    mailbox: Mailbox,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    latent: torch.Tensor | None,
    lse: torch.Tensor | None,
    deadline_nanoseconds: int,
    stream: int,
) -> None:
    """Sparse decode: the query mailbox is read, the use counter of stage SPARSE says which generation.

    kv: uint8 [N, 576], the flat cache, contiguous rows. rows: int32 [>= B, K], this rank's flat rows as a prefix.
    valid: int32 [>= B], their counts (0 .. K). latent: bf16 [>= B, padded, 512] and lse: fp32 [>= B, padded], the
    outputs of the local route (natural-log LSE; only the first `heads` of a row are written); None for push.
    """
    kernel(
        *_pushing(mailbox),
        kv.data_ptr(),
        rows.data_ptr(),
        valid.data_ptr(),
        0 if latent is None else latent.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        mailbox.geometry.scale_log2,
        mailbox.geometry.k_scale,
        deadline_nanoseconds,
        stream,
    )


def run_chain(
    kernel: Kernel,
    mailbox: Mailbox,
    query: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    valid: torch.Tensor,
    merged: torch.Tensor,
    deadline_nanoseconds: int,
    stream: int,
) -> None:
    """Stages 1 to 3 of the push route in one launch: query as in `run_query`, merged as in `run_value`.

    kv, rows, valid: as in `run_sparse`. All ranks' chains must be able to run at the same time: each waits for the
    others.
    """
    geometry = mailbox.geometry
    kernel(
        *_pushing(mailbox),
        query.data_ptr(),
        kv.data_ptr(),
        rows.data_ptr(),
        valid.data_ptr(),
        merged.data_ptr(),
        numerics.reciprocal(geometry.q_scale),
        geometry.scale_log2,
        geometry.k_scale,
        deadline_nanoseconds,
        stream,
    )


def run_value_push(kernel: Kernel, mailbox: Mailbox, latent: torch.Tensor, lse_ln: torch.Tensor, stream: int) -> None:
    """Stage 3a. latent: bf16 [>= B, padded, 512], lse_ln: fp32 [>= B, padded], contiguous, as stage 2 left them."""
    kernel(*_pushing(mailbox), latent.data_ptr(), lse_ln.data_ptr(), stream)


def run_value(kernel: Kernel, mailbox: Mailbox, merged: torch.Tensor, deadline_nanoseconds: int, stream: int) -> None:
    """The merge. merged: bf16 [>= B, H, 512], contiguous, on the GPU: the merged rows of this rank's own heads.

    Nothing is written by a CTA whose wait expired.
    """
    kernel(*_receiving(mailbox), merged.data_ptr(), deadline_nanoseconds, stream)


def run_digest(kernel: Kernel, merged: torch.Tensor, rows: torch.Tensor, digests: torch.Tensor, stream: int) -> None:
    """SHA-256 of the first rows of every (layer, rank) of a step; no mailbox takes part.

    merged: bf16 [.., B, H, 512], contiguous, on the GPU. rows: int64, on the GPU, how many of the B (0 .. B). digests:
    uint8 [.., 32], contiguous.
    """
    kernel(merged.data_ptr(), rows.data_ptr(), digests.data_ptr(), digests.numel() // digests.shape[-1], stream)


def _pushing(mailbox: Mailbox) -> tuple[int, int, int]:
    """(own region, table of peers, rank)"""
    return mailbox.memory.local.data_ptr(), mailbox.memory.addresses.data_ptr(), mailbox.rank


def _receiving(mailbox: Mailbox) -> tuple[int, int]:
    """(own region, rank)"""
    return mailbox.memory.local.data_ptr(), mailbox.rank
