"""The stages of one verify step of one layer, for one rank on a GPU: the kernels behind the interface of `CpuStages`.

    select_push -> receive -> query_push -> sparse_decode -> [value_push ->] merge
                              |-------- fused_chain: one launch (push route) ----|

Each method launches on the current CUDA stream and returns at once, so that a whole step can be captured in a graph.
Nothing is read back: an expired wait shows in the mailbox's abort word, which the caller reads once a step.
"""

from __future__ import annotations

import torch

from dcp_decode import numerics, topk
from dcp_decode.cpu.stages import LocalPartial
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.kernels.aot import architecture_of
from dcp_decode.kernels.chain_config import chain_config
from dcp_decode.kernels.configs import KernelConfig, stage_kernels
from dcp_decode.kernels.launch import (
    Kernel,
    LoadKernel,
    run_chain,
    run_digest,
    run_query,
    run_sparse,
    run_topk_push,
    run_topk_receive,
    run_value,
    run_value_push,
)
from dcp_decode.kernels.sparse_layout import decode_config, sparse_for
from dcp_decode.mailbox import Mailbox, Stage


class GpuStages:
    """One rank's stages on the device of its mailbox. Raises UnsupportedEnvironment if its geometry is refused.

    push: the route. load_kernel: compiles kernels, or takes them from a build (`aot.open_kernels`). fused: batches that
    run as one launch, the same on all ranks (`chain_config.fused_for`).
    """

    def __init__(
        self,
        mailbox: Mailbox,
        deadline_seconds: float,
        push: bool,
        load_kernel: LoadKernel,
        fused: frozenset[int] = frozenset(),
    ) -> None:
        self.mailbox = mailbox
        self.geometry = mailbox.geometry
        self.rank = mailbox.rank
        self.push = push
        self.deadline_nanoseconds = int(deadline_seconds * 1e9)
        self.architecture = architecture_of(mailbox_device(mailbox))
        refusal = sparse_for(self.geometry, self.geometry.capacity, push, self.architecture)
        if refusal is not None:
            raise UnsupportedEnvironment(str(refusal))
        self._load_kernel = load_kernel
        self._fused = fused
        self._kernels: dict[int, dict[str, Kernel]] = {}  # by batch and name
        self._received: dict[int, torch.Tensor] = {}

    def prepare(self, batch: int) -> None:
        """Load the kernels of a batch of B rows, and allocate what outlives a step: before the first use of B."""
        if batch in self._kernels:
            return
        g = self.geometry
        configs: dict[str, KernelConfig] = stage_kernels(g, batch, self.push, self.architecture)
        if batch in self._fused:
            configs["chain"] = chain_config(g, batch)
        self._kernels[batch] = {name: self._load_kernel(name, config) for name, config in configs.items()}
        # Candidates, so that what an expired wait leaves unwritten can be compared with others.
        self._received[batch] = torch.full(
            (g.dcp, batch, g.topk), topk.ABSENT, dtype=torch.int64, device=mailbox_device(self.mailbox)
        )

    def family(self, batch: int) -> str:
        """Of the sparse decode of B rows (`oracle.FAMILIES`): as the layout chooses it."""
        return decode_config(self.geometry, batch, self.push, self.architecture).family

    def fuses(self, batch: int) -> bool:
        """Whether B rows may run as `fused_chain`, on all ranks alike."""
        return batch in self._fused

    def select_push(self, candidates: torch.Tensor) -> None:
        """Stage 0, first half: this rank's local top-k (int64 [B, K]) into every rank's mailbox."""
        kernel = self._kernels[len(candidates)]["topk_push"]
        run_topk_push(kernel, self.mailbox, candidates.contiguous(), _stream())

    def receive(self, batch: int) -> torch.Tensor:
        """Stage 0, second half: all ranks' lists, int64 [D, B, K]; the tensor is overwritten by the next use."""
        received = self._received[batch]
        kernel = self._kernels[batch]["topk_receive"]
        run_topk_receive(kernel, self.mailbox, received, self.deadline_nanoseconds, _stream())
        return received

    def query_push(self, query: torch.Tensor) -> None:
        """Stage 1: own heads' query (BF16 [B, H, 576]) as E4M3 into every rank's query mailbox."""
        run_query(self._kernels[len(query)]["query_push"], self.mailbox, query.contiguous(), _stream())

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
        kernel = self._kernels[len(partial.latent)]["value_push"]
        run_value_push(kernel, self.mailbox, partial.latent, partial.lse_ln, _stream())

    def merge(self, batch: int, after: Stage) -> torch.Tensor:
        """Stage 3 (3b): merged rows BF16 [B, H, 512] of this rank's own heads. after: as the route has it."""
        assert (after == Stage.SPARSE) == self.push
        merged = self._merged(batch)
        run_value(self._kernels[batch]["merge"], self.mailbox, merged, self.deadline_nanoseconds, _stream())
        return merged

    def fused_chain(
        self, query: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Stages 1 to 3 of the push route in one launch: arguments and result as theirs. Waits for all ranks'."""
        self._refuse_rows(rows)
        batch = len(query)
        merged = self._merged(batch)
        run_chain(
            self._kernels[batch]["chain"],
            self.mailbox,
            query.contiguous(),
            cache,
            rows,
            valid,
            merged,
            self.deadline_nanoseconds,
            _stream(),
        )
        return merged

    def digest(self, merged: torch.Tensor, rows: torch.Tensor, digests: torch.Tensor) -> None:
        """SHA-256 of the first `rows` (int64 []) rows of each of BF16 [.., B, H, 512], into uint8 [.., 32]."""
        run_digest(self._kernels[merged.shape[-3]]["digest"], merged, rows, digests, _stream())

    def _merged(self, batch: int) -> torch.Tensor:
        shape = (batch, self.geometry.owner_heads, numerics.LATENT_DIM)
        return torch.empty(shape, dtype=torch.bfloat16, device=mailbox_device(self.mailbox))

    def _refuse_rows(self, rows: torch.Tensor) -> None:
        if rows.shape[1] != self.geometry.topk or not rows.is_contiguous():
            raise ValueError(f"rows {tuple(rows.shape)} must be contiguous and {self.geometry.topk} wide")

    def _decode(
        self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, partial: LocalPartial | None
    ) -> None:
        self._refuse_rows(rows)
        run_sparse(
            self._kernels[len(valid)]["sparse_decode"],
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
