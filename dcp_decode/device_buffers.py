"""Inputs and outputs of a verify step on a device, at fixed addresses: what a captured graph reads and writes.

    plan --host integers (pinned)--> integers --> [ stages ] --> merged --SHA-256--> digests
                                                                  digests, valid, expired --one copy--> host (pinned)

Both copies are part of the step's graph, so a replay is one launch. Merged rows stay on the device, but those of steps
that are verified: 24 layers of 8 ranks leave 47 MB with 20 rows a step. Copying them out and hashing them on the host
took 28 ms a step, beside 14 on the GPU, 0.9 of them the copy; there their hashes take 3.6. It also drove what the next
launch needs out of the host's caches.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dcp_decode import numerics
from dcp_decode.device_rank import PADDING, StepShape
from dcp_decode.digest import DIGEST_BYTES
from dcp_decode.geometry import Geometry
from dcp_decode.service import VerifyRow
from dcp_decode.step import Batch, LayerResult, LayerRun, StepResult

if TYPE_CHECKING:
    from dcp_decode.cpu.stages import CpuStages
    from dcp_decode.device_graph import StepGraph
    from dcp_decode.device_rank import DeviceBatch
    from dcp_decode.kernels.stages import GpuStages
    from dcp_decode.service import RequestState


@dataclass(frozen=True)
class _Outputs:
    """What every step leaves for the host, in one piece of memory; the other tensors are views of `whole` (uint8).

    digests uint8 [layers, ranks, 32], of the real rows; valid int32 [layers, ranks, B]; expired int32 [ranks], not 0
    once a wait of the rank has expired.
    """

    whole: torch.Tensor
    digests: torch.Tensor
    valid: torch.Tensor
    expired: torch.Tensor

    @classmethod
    def zeros(cls, layers: int, ranks: int, rows: int, **where: Any) -> _Outputs:
        """where: arguments of `torch.zeros`."""
        sizes = [layers * ranks * DIGEST_BYTES, 4 * layers * ranks * rows, 4 * ranks]
        whole = torch.zeros(sum(sizes), dtype=torch.uint8, **where)
        digests, valid, expired = whole.split(sizes)
        return cls(
            whole,
            digests.view(layers, ranks, DIGEST_BYTES),
            valid.view(torch.int32).view(layers, ranks, rows),
            expired.view(torch.int32),
        )


class StepBuffers:
    """Buffers of one shape for the local ranks of a process.

    graph: the captured step; uses: steps it has run; seconds: that the newest replay took.

    merged: BF16 [layers, ranks, B, H, 512] and positions: int32 [layers, ranks, B, K], on the device.
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
        self.seconds = math.inf
        self.family = ""  # of the sparse decode, once a layer has run
        self.integers = torch.zeros(shape.integers, dtype=torch.int64, device=device)
        lead = (layers, len(ranks), shape.rows)
        self._made = _Outputs.zeros(*lead, device=device)
        self._read = _Outputs.zeros(*lead, pin_memory=on_gpu)
        self._valid, self._expired = self._read.valid.numpy(), self._read.expired.numpy()
        merged_shape = (*lead, geometry.owner_heads, numerics.LATENT_DIM)
        self.merged = torch.zeros(merged_shape, dtype=torch.bfloat16, device=device)
        self.positions = torch.zeros((*lead, geometry.topk), dtype=torch.int32, device=device)
        self._host_integers = torch.zeros(shape.integers, dtype=torch.int64, pin_memory=on_gpu)
        array = self._host_integers.numpy()
        first_table = 1 + 3 * shape.requests
        self._rows = array[:first_table].data
        self._tables = array[first_table:].reshape(shape.requests, shape.pages)
        self._pack = struct.Struct(f"{first_table}q").pack_into
        self._padding = (0, PADDING, 0) * shape.requests
        self._requests: list[int] = []

    def write(self, turns: Sequence[VerifyRow], requests: Mapping[int, RequestState]) -> None:
        """Put a step's integers where `load` finds them. The step before must have ended.

        turns: the first row of each request. requests: as they stand, whose pages stay the same while they run.
        """
        integers: list[int] = []
        for row in turns:
            integers += (row.request, row.position, row.salt)
        rows = len(turns) * self.shape.rows_a_request
        self._pack(self._rows, 0, rows, *integers, *self._padding[len(integers) :])
        if self._requests != integers[::3]:
            self._requests = integers[::3]
            for turn, request in enumerate(self._requests):
                pages = requests[request].pages[: self.shape.pages]
                self._tables[turn, : len(pages)] = pages

    def load(self) -> None:
        """Copy the step's integers to the device, in stream order."""
        self.integers.copy_(self._host_integers, non_blocking=True)

    def keep(self, layer: int, runs: list[LayerRun[DeviceBatch]]) -> None:
        """Keep the rows that a layer has merged on all local ranks."""
        torch.stack([run.merged for run in runs], out=self.merged[layer])
        self.family = runs[0].family

    def read(self, batch: DeviceBatch, stages: Sequence[CpuStages | GpuStages]) -> None:
        """Keep what was selected, and copy what every step needs on the host there, in stream order."""
        stages[0].digest(self.merged, self.integers[0], self._made.digests)
        self._made.valid.copy_(batch.valid)
        self.positions.copy_(batch.selected_positions[:, :-1].view(self.positions.shape))
        torch.stack([one.mailbox.abort_word for one in stages], out=self._made.expired)
        self._read.whole.copy_(self._made.whole, non_blocking=True)

    @property
    def any_expired(self) -> bool:
        """Whether a wait of a local rank had expired by the end of the step."""
        return bool(self._expired.any())

    def result(self, batch: Batch, verified: bool) -> StepResult:
        """What the newest step left; verified: its rows too."""
        count = len(batch.rows)
        whole = self._read.digests.numpy().tobytes()
        digests = [whole[start : start + DIGEST_BYTES] for start in range(0, len(whole), DIGEST_BYTES)]
        results = self._results(batch, digests) if verified else []
        return StepResult(self.family, digests, self._valid[:, :, :count], results)

    def _results(self, batch: Batch, digests: list[bytes]) -> list[LayerResult]:
        count = len(batch.rows)
        merged, positions = (one[:, :, :count].cpu() for one in (self.merged, self.positions))
        valid, positions = self._read.valid[:, :, :count], positions.to(torch.int64)
        return [
            LayerResult(
                rank,
                layer,
                self.family,
                batch,
                digests[layer * len(self.ranks) + index],
                merged[layer, index],
                valid[layer, index],
                positions[layer, index],
            )
            for layer in range(self.layers)
            for index, rank in enumerate(self.ranks)
        ]
