"""Inputs and outputs of a verify step on a device, at fixed addresses: what a captured graph reads and writes.

    plan --host integers (pinned)--> integers --> [ stages ] --> merged, valid, expired --one copy--> host (pinned)

Both copies are part of the step's graph, so a replay is one launch. What the host does before it runs on caches that
the results of the step before have filled, where every Python and NumPy call costs several times its usual time: a step
writes its integers in one call, and page tables only when other requests take part.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dcp_decode import numerics
from dcp_decode.device_rank import PADDING, StepShape
from dcp_decode.geometry import Geometry
from dcp_decode.service import VerifyRow
from dcp_decode.step import Batch, LayerResult, LayerRun

if TYPE_CHECKING:
    from dcp_decode.device_graph import StepGraph
    from dcp_decode.device_rank import DeviceBatch
    from dcp_decode.mailbox import Mailbox


@dataclass(frozen=True)
class _Outputs:
    """What a step leaves for the host, in one piece of memory; the other tensors are views of `whole` (uint8).

    merged BF16 [layers, ranks, B, H, 512]; valid int32 [layers, ranks, B]; expired int32 [ranks], not 0 once a wait of
    the rank has expired.
    """

    whole: torch.Tensor
    merged: torch.Tensor
    valid: torch.Tensor
    expired: torch.Tensor

    @classmethod
    def zeros(cls, merged_shape: tuple[int, ...], **where: Any) -> _Outputs:
        """where: arguments of `torch.zeros`."""
        lead = merged_shape[:3]
        sizes = [2 * math.prod(merged_shape), 4 * math.prod(lead), 4 * lead[1]]
        whole = torch.zeros(sum(sizes), dtype=torch.uint8, **where)
        merged, valid, expired = whole.split(sizes)
        return cls(
            whole,
            merged.view(torch.bfloat16).view(merged_shape),
            valid.view(torch.int32).view(lead),
            expired.view(torch.int32),
        )


class StepBuffers:
    """Buffers of one shape for the local ranks of a process. graph: the captured step; uses: steps it has run.

    positions: int32 [layers, ranks, B, K], on the device.
    """

    def __init__(
        self, shape: StepShape, geometry: Geometry, layers: int, ranks: list[int], device: torch.device
    ) -> None:
        on_gpu = device.type == "cuda"
        self.shape = shape
        self.contexts = shape.contexts(geometry)
        self.layers = layers
        self.ranks = ranks
        self.graph: StepGraph | None = None
        self.uses = 0
        self.family = ""  # of the sparse decode, once a layer has run
        self.integers = torch.zeros(shape.integers, dtype=torch.int64, device=device)
        lead = (layers, len(ranks), shape.rows)
        merged_shape = (*lead, geometry.owner_heads, numerics.LATENT_DIM)
        self._made = _Outputs.zeros(merged_shape, device=device)
        self._read = _Outputs.zeros(merged_shape, pin_memory=on_gpu)
        self.positions = torch.zeros((*lead, geometry.topk), dtype=torch.int32, device=device)
        self._host_integers = torch.zeros(shape.integers, dtype=torch.int64, pin_memory=on_gpu)
        array = self._host_integers.numpy()
        self._rows = array[: 3 * shape.requests].data
        self._tables = array[3 * shape.requests :].reshape(shape.requests, shape.pages)
        self._pack = struct.Struct(f"{3 * shape.requests}q").pack_into
        self._padding = (0, PADDING, 0) * shape.requests
        self._requests: list[int] = []

    def write(self, turns: Sequence[VerifyRow], tables: dict[int, np.ndarray]) -> None:
        """Put a step's integers where `load` finds them. The step before must have ended.

        turns: the first row of each request. tables: int64 page table of each request.
        """
        integers: list[int] = []
        for row in turns:
            integers += (row.request, row.position, row.salt)
        self._pack(self._rows, 0, *integers, *self._padding[len(integers) :])
        if self._requests != integers[::3]:
            self._requests = integers[::3]
            for turn, request in enumerate(self._requests):
                table = tables[request][: self.shape.pages]
                self._tables[turn, : len(table)] = table

    def load(self) -> None:
        """Copy the step's integers to the device, in stream order."""
        self.integers.copy_(self._host_integers, non_blocking=True)

    def keep(self, layer: int, runs: list[LayerRun[DeviceBatch]]) -> None:
        """Keep the rows that a layer has merged on all local ranks."""
        torch.stack([run.merged for run in runs], out=self._made.merged[layer])
        self.family = runs[0].family

    def read(self, batch: DeviceBatch, mailboxes: list[Mailbox]) -> None:
        """Keep what was selected, and copy what every step needs on the host there, in stream order."""
        self._made.valid.copy_(batch.valid)
        self.positions.copy_(batch.selected_positions[:, :-1].view(self.positions.shape))
        torch.stack([mailbox.abort_word for mailbox in mailboxes], out=self._made.expired)
        self._read.whole.copy_(self._made.whole, non_blocking=True)

    @property
    def any_expired(self) -> bool:
        """Whether a wait of a local rank had expired by the end of the step."""
        return bool(self._read.expired.any())

    def results(self, batch: Batch, positions_wanted: bool) -> list[LayerResult]:
        """A result for every (layer, local rank), real rows only; views that the next step overwrites."""
        count = len(batch.rows)
        kept = self.positions if positions_wanted else self.positions[..., :0]
        positions = kept.cpu().to(torch.int64)
        return [
            LayerResult(
                rank,
                layer,
                self.family,
                batch,
                self._read.merged[layer, index, :count],
                self._read.valid[layer, index, :count],
                positions[layer, index, :count],
            )
            for layer in range(self.layers)
            for index, rank in enumerate(self.ranks)
        ]
