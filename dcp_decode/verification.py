"""Checks a layer's merged rows of one rank against the oracle, from nothing but the workload's integers.

Everything is made again: keys and queries from the generator, the selection by brute force over all scores. The
caches, the page tables, the top-k exchange, the mailboxes and the stages all stand between that and the merged rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dcp_decode import cache, numerics, oracle, topk
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.digest import rows_digest
from dcp_decode.errors import WrongResult
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import Stage
from dcp_decode.needle import build_needle, check_needle
from dcp_decode.service import VerifyRow
from dcp_decode.step import AfterStage, Batch, LayerResult, LayerRun, own_heads
from dcp_decode.workload import Workload

if TYPE_CHECKING:
    from dcp_decode.kernels.stages import GpuStages

# Rows checked at once: the oracle's FP64 intermediates are about 40 MB a row at 2048 keys. A GPU has room for more, and
# is faster with few large launches.
ROWS_AT_ONCE = {"cpu": 5, "cuda": 40}


@dataclass
class WorstRow:
    """The (row, head) closest to its bound so far: relative error against the oracle, its bound, and where."""

    error: float = 0.0
    bound: float = 0.0
    place: str = ""

    @property
    def share(self) -> float:
        """Error over bound; 0 before anything was checked."""
        return self.error / self.bound if self.bound else 0.0


@dataclass(frozen=True)
class _Expected:
    """What one row attends to: key bytes uint8 [K, 576] and source int64 [K] (-1 absent) where the oracle computes.

    positions: int64, sorted, and owners: int64, the ranks that store them; on the host.
    """

    keys: torch.Tensor
    source: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor


class Verifier:
    """The oracle's side of one run. Raises WrongResult, naming step, layer, rank, row and head.

    device: where it computes. Its integers are the same everywhere, and a GPU's FP64 is as exact as a CPU's.
    """

    def __init__(self, geometry: Geometry, workload: Workload, device: torch.device | str = "cpu") -> None:
        self.geometry = geometry
        self.workload = workload
        self.device = torch.device(device)
        self.worst = WorstRow()
        # What the rows of the newest (step, layer) attend to: the same for every rank that is checked in turn.
        self._place = (-1, -1)
        self._attended: dict[VerifyRow, _Expected] = {}

    def check(self, step: int, runs: Sequence[LayerRun[Batch] | LayerResult]) -> None:
        """Check every row of a layer of consecutive ranks: their shares of the selection exactly, the merged rows by
        their bounds.
        """
        for run in runs:
            self._check_digest(step, run)
        first, batch = runs[0], runs[0].batch
        at_once = ROWS_AT_ONCE[self.device.type]
        for start in range(0, len(batch.rows), at_once):
            rows = batch.rows[start : start + at_once]
            expected = [self._expected(step, first.layer, row, batch) for row in rows]
            for run in runs:
                for index, one in enumerate(expected, start):
                    self._check_selection(step, index, one, run)
            verdict = self._verdict(rows, expected, runs, start)
            if not verdict.ok and len(runs) > 1:
                for run in runs:  # names the rank
                    self.check(step, [run])
            place = f"step {step}, layer {first.layer}, rank {first.rank}"
            verdict.require(f"{place}, counting rows from {start}", place, start)
            loosest = float(verdict.bound_oracle.max())
            if not loosest < 1:  # NaN too
                raise WrongResult(f"{place}: at these scales a row is allowed an error of {loosest:.3g} times its norm")
            worst = verdict.worst
            rank = first.rank + worst.head // self.geometry.owner_heads
            candidate = WorstRow(
                worst.error, worst.bound, f"step {step}, layer {first.layer}, rank {rank}, row {start + worst.row}"
            )
            if candidate.share > self.worst.share or not self.worst.bound:  # every error may be exactly 0
                self.worst = candidate

    def forget(self) -> None:
        """Drop what was kept for further ranks of the newest (step, layer)."""
        self._place = (-1, -1)
        self._attended.clear()

    def _verdict(
        self,
        rows: tuple[VerifyRow, ...],
        expected: list[_Expected],
        runs: Sequence[LayerRun[Batch] | LayerResult],
        start: int,
    ) -> oracle.Verdict:
        """On rows from number `start`, the heads of all ranks side by side."""
        heads = range(own_heads(runs[0].rank, self.geometry).start, own_heads(runs[-1].rank, self.geometry).stop)
        return oracle.verify_rows(
            torch.cat([run.merged[start : start + len(rows)] for run in runs], dim=1).to(self.device),
            self._query_bytes(runs[0].layer, rows, heads),
            torch.stack([one.keys for one in expected]),
            torch.stack([one.source for one in expected]),
            self.geometry,
            runs[0].family,
        )

    def _expected(self, step: int, layer: int, row: VerifyRow, batch: Batch) -> _Expected:
        if self._place != (step, layer):
            self._place = (step, layer)
            self._attended.clear()
        if row not in self._attended:
            self._attended[row] = self._attend(layer, row, batch)
        return self._attended[row]

    def _attend(self, layer: int, row: VerifyRow, batch: Batch) -> _Expected:
        width = self.geometry.topk
        visible = torch.arange(row.position + 1, device=self.device)
        salts = batch.requests[row.request].salts[: row.position + 1].to(self.device)
        scores = self.workload.index_scores(layer, row.request, row.position, row.salt, visible, salts)
        positions = topk.global_topk(scores, width)
        keys = torch.zeros(width, numerics.ROW_BYTES, dtype=torch.uint8, device=self.device)
        keys[: len(positions)] = self.workload.key_bytes(layer, row.request, positions, salts[positions])
        source = torch.full((width,), -1, dtype=torch.int64, device=self.device)
        owners = cache.owner(positions, self.geometry)
        source[: len(positions)] = owners
        return _Expected(keys, source, positions.cpu(), owners.cpu())

    def _check_selection(self, step: int, index: int, expected: _Expected, run: LayerRun[Batch] | LayerResult) -> None:
        count = int(run.valid[index])
        own = expected.positions[expected.owners == run.rank]
        if not torch.equal(run.positions[index][:count], own):
            raise WrongResult(
                f"step {step}, layer {run.layer}, rank {run.rank}, row {index}: the selection of {count} own positions "
                f"differs from the exact top-k's {len(own)}"
            )

    def _check_digest(self, step: int, run: LayerRun[Batch] | LayerResult) -> None:
        if isinstance(run, LayerResult) and run.digest != rows_digest(run.merged):
            place = f"step {step}, layer {run.layer}, rank {run.rank}"
            raise WrongResult(f"{place}: the digest made on the device is not that of the merged rows")

    def _query_bytes(self, layer: int, rows: tuple[VerifyRow, ...], heads: range) -> torch.Tensor:
        made = []
        for row in rows:
            position, salt = torch.tensor([[row.position], [row.salt]], device=self.device)
            made.append(self.workload.queries(layer, row.request, position, salt, heads))
        return numerics.quantize_e4m3(torch.cat(made), self.geometry.q_scale)


def check_needle_group(
    group: Sequence[CpuStages | GpuStages],
    geometry: Geometry,
    route: str,
    seed: int,
    device: torch.device | str = "cpu",
    after_stage: AfterStage = lambda name: None,
) -> None:
    """The needle test through the real mailboxes: one use in which every key must be counted exactly once.

    Row 0 deals geometry.topk coded keys to the ranks as their positions would be; row 1 (if the mailbox has room) gives
    them all to the last rank, so that the others push EMPTY_LSE. The query is 0, so every key has the same weight.
    after_stage: as in `step.verify_layer`. Raises WrongResult, naming a key that was lost or counted twice.
    Collective: every rank runs its `group`.
    """
    needle = build_needle(geometry.topk, seed, geometry)
    keys = torch.arange(geometry.topk)
    owners = [cache.owner(keys, geometry), torch.full_like(keys, geometry.dcp - 1)][: geometry.capacity]
    shape = (len(owners), geometry.owner_heads, numerics.ROW_BYTES)
    query = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    coded = needle.key_bytes.to(device)

    def selection(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.full((len(owners), geometry.topk), -1, dtype=torch.int64)
        for row, owner in enumerate(owners):
            own = keys[owner == rank]
            positions[row, : len(own)] = own
        rows, valid = topk.compact_rows(positions, positions)
        return rows.to(device), valid.to(device)

    for stages in group:
        stages.query_push(query)
    after_stage("query_push")
    if route == "push":
        for stages in group:
            stages.sparse_decode_push(coded, *selection(stages.rank))
        after_stage("sparse_decode_push")
        merged = [stages.merge(len(owners), after=Stage.SPARSE) for stages in group]
    else:
        partials = [stages.sparse_decode_local(coded, *selection(stages.rank)) for stages in group]
        for stages, partial in zip(group, partials, strict=True):
            stages.value_push(partial)
        after_stage("value_push")
        merged = [stages.merge(len(owners), after=Stage.PUSH) for stages in group]
    for rows in merged:
        check_needle(needle, rows.cpu())
