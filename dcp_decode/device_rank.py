"""Ranks whose verify step is made of static shapes on their device: no size, address or branch depends on the step.

    host, one copy a step       device, captured once a shape
    integers of the step  --->  rows, page tables --> all layers' own keys, queries, scores, local top-k
                                                                               |
                          a layer: append, exchange of the lists, border --> rows, valid --> decode

`S` is a bucket: every rank scores the positions that a page table of `pages` pages could hold, and masks those behind
a row's own. Rows of padding have position -1: they see nothing, select nothing and append to a spare page.

Salts (who is the token at a position?) lie beside the cache, one a flat row, so that they are paged like the keys.

What no layer has to wait for is made once for all layers, and what no rank has to wait for once for all local ranks:
a graph of fewer nodes is launched and run in less time. Index scores stand for the model's own work, so they may be
made ahead. With 24 layers of 8 local ranks, a launch for each rank and layer was 511 us of host work and 75 ms a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dcp_decode import cache, numerics, topk
from dcp_decode.batch_workload import BatchRows, BatchWorkload
from dcp_decode.cache import FlatCache
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.geometry import PAGE_TOKENS, Geometry
from dcp_decode.service import NEVER_WRITTEN, RequestState
from dcp_decode.step import Selection
from dcp_decode.workload import Workload

if TYPE_CHECKING:
    from dcp_decode.kernels.stages import GpuStages

PADDING = -1  # position of a row of padding
NEEDLE_ROWS = 2  # of the needle test before a run, as far as the mailbox has rows
PREFILL_ROWS = 1 << 16  # rows made at once: 290 MB of intermediates
SCORES_AT_ONCE = 1 << 25  # index scores made at once: about 1.5 GB of intermediates


@dataclass(frozen=True)
class StepShape:
    """What a captured step is specialised for: requests, rows of each, pages of the longest page table.

    All ranks choose it from the plan, which is replicated, so they agree without asking.
    """

    requests: int
    rows_a_request: int
    pages: int

    @property
    def rows(self) -> int:
        """B."""
        return self.requests * self.rows_a_request

    @property
    def candidates(self) -> int:
        """S: local positions that are scored."""
        return self.pages * PAGE_TOKENS

    @property
    def integers(self) -> int:
        """int64 of a step: its real rows; request, first position and salt of every request; then its page table."""
        return 1 + self.requests * (3 + self.pages)

    def contexts(self, geometry: Geometry) -> range:
        """Lengths of the longest context, drafts included, that need this bucket of pages and no smaller one."""
        return range(_tokens(self.pages // 2, geometry) + 1, _tokens(self.pages, geometry) + 1)

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.requests} requests, {self.candidates} positions a rank"


def _tokens(pages: int, geometry: Geometry) -> int:
    """The longest context that fits `pages` pages on the rank that stores the most of it."""
    runs, rest = divmod(pages * PAGE_TOKENS, geometry.interleave)
    return runs * geometry.interleave * geometry.dcp + rest


def step_shape(requests: int, rows_a_request: int, longest: int, geometry: Geometry) -> StepShape:
    """The bucket of a step: requests and pages rounded up to powers of two, as far as the mailbox has rows.

    longest: context of the longest request, in tokens, its drafts included.
    """
    fitting = min(_power_of_two(requests), geometry.capacity // rows_a_request)
    return StepShape(fitting, rows_a_request, _power_of_two(cache.pages_needed(longest, geometry)))


def step_batches(rows_a_request: int, geometry: Geometry) -> tuple[int, ...]:
    """Every B that a run launches kernels for, ascending: of its steps' shapes, and of its needle test."""
    most = geometry.capacity // rows_a_request
    steps = {min(_power_of_two(requests), most) * rows_a_request for requests in range(1, most + 1)}
    return tuple(sorted(steps | {min(NEEDLE_ROWS, geometry.capacity)}))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclass
class DeviceBatch:
    """A step's rows on the device, and what R local ranks have made of them before the first layer.

    encoded: own tokens' KV rows, uint8 [layers, R * B, 576], and own_rows: int64 [R * B], where all ranks' caches store
    them. queries: BF16 [layers, R, B, H, 576]. Local top-k of every rank and row, in ascending position order: keys
    int64 [layers, R, B, K], flat int32 (cache rows) and positions int32, any value where a key is absent.
    selected_rows, selected_positions: int32 [layers, R * B * K + 1], -1 until a layer selects; the last one is spare.
    valid: int32 [layers, R, B]. before_first: int64 [R, B, 1], the place before a row's first in a layer of those, and
    spare_place: int64 [], the place of their spare one.
    """

    size: int
    encoded: torch.Tensor
    own_rows: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    flat: torch.Tensor
    positions: torch.Tensor
    selected_rows: torch.Tensor
    selected_positions: torch.Tensor
    valid: torch.Tensor
    before_first: torch.Tensor
    spare_place: torch.Tensor

    def selection(self, layer: int, index: int) -> Selection:
        """What local rank number `index` selects in a layer: views, filled by `DeviceGroup.select`."""
        shape = self.keys.shape[1:]
        return Selection(
            self.selected_positions[layer, :-1].view(shape)[index],
            self.selected_rows[layer, :-1].view(shape)[index],
            self.valid[layer, index],
        )


class DeviceGroup:
    """What the local ranks of one process hold through a run: caches and salts on their device, and their stages.

    stages: of R consecutive ranks. pages: of each rank's cache, as the pool hands them out; a spare one is added, where
    rows of padding and tokens of other ranks are written. All caches of a layer are one tensor.
    """

    def __init__(
        self,
        geometry: Geometry,
        workload: Workload,
        layers: int,
        pages: int,
        stages: Sequence[CpuStages | GpuStages],
    ) -> None:
        self.geometry = geometry
        self.workload = workload
        self.layers = layers
        self.device = stages[0].mailbox.memory.local.device
        self.rows_a_rank = (pages + 1) * geometry.page_stride_rows
        self.cache = FlatCache(layers, len(stages) * (pages + 1), geometry, self.device)
        self.salts = torch.full((len(stages), self.rows_a_rank), NEVER_WRITTEN, dtype=torch.int64, device=self.device)
        self.stages = stages
        numbers = torch.tensor([one.rank for one in stages], device=self.device)
        self._numbers = numbers[:, None]  # (R, 1)
        self._first_rows = torch.arange(len(stages), device=self.device)[:, None] * self.rows_a_rank  # (R, 1)
        first = stages[0].rank * geometry.owner_heads
        self._heads = range(first, first + len(stages) * geometry.owner_heads)
        self._received: list[torch.Tensor] = []

    def ranks(self) -> list[DeviceRank]:
        """The local ranks, for `step.verify_layer`; they hold the group."""
        return [DeviceRank(self, index, one) for index, one in enumerate(self.stages)]

    def begin(self, shape: StepShape, integers: torch.Tensor) -> DeviceBatch:
        """All that comes before the first layer. integers: int64 [shape.integers]."""
        geometry, layers, ranks = self.geometry, self.layers, len(self.stages)
        of_requests, tables = integers[1:].split([3 * shape.requests, shape.requests * shape.pages])
        request, first, salt = of_requests.view(shape.requests, 3, 1).unbind(1)  # (requests, 1)
        offsets = torch.arange(shape.rows_a_request, device=self.device)
        position = (first + offsets).masked_fill_(first == PADDING, PADDING).view(-1)  # (B)
        request, salt = (one.expand(-1, shape.rows_a_request).reshape(-1) for one in (request, salt))
        tables = tables.view(shape.requests, 1, shape.pages).expand(-1, shape.rows_a_request, -1)
        tables = tables.reshape(shape.rows, shape.pages)
        workload = BatchWorkload(self.workload, layers, BatchRows(request, position, salt))
        own_rows = self._append_places(position, tables)
        self.salts.view(-1).index_copy_(0, own_rows, salt.repeat(ranks))
        values = self.workload.decode_keys(workload.keys())  # (layers, B, 576) BF16
        queries = workload.queries(self._heads).view(layers, shape.rows, ranks, geometry.owner_heads, -1)
        keys, flat, positions = self._candidates(shape, workload, tables)
        places = ranks * shape.rows * geometry.topk
        return DeviceBatch(
            size=shape.rows,
            encoded=numerics.quantize_e4m3(values, geometry.k_scale).repeat(1, ranks, 1),
            own_rows=own_rows,
            queries=queries.transpose(1, 2).contiguous(),
            keys=keys,
            flat=flat,
            positions=positions,
            selected_rows=torch.full((layers, places + 1), -1, dtype=torch.int32, device=self.device),
            selected_positions=torch.full((layers, places + 1), -1, dtype=torch.int32, device=self.device),
            valid=torch.empty(layers, ranks, shape.rows, dtype=torch.int32, device=self.device),
            before_first=torch.arange(-1, places - 1, geometry.topk, device=self.device).view(ranks, shape.rows, 1),
            spare_place=torch.full((), places, device=self.device),
        )

    def receive(self, lists: torch.Tensor, layer: int, batch: DeviceBatch) -> None:
        """A rank's part of the exchange (int64 [D, B, K]); the last one's completes the selection of all."""
        self._received.append(lists)
        if len(self._received) == len(self.stages):
            self._select(torch.stack(self._received), layer, batch)
            self._received.clear()

    def _select(self, received: torch.Tensor, layer: int, batch: DeviceBatch) -> None:
        """Every rank keeps its own candidates among the best K of all. received: int64 [R, D, B, K]."""
        ranks, dcp, rows, width = received.shape
        together = received.transpose(1, 2).reshape(ranks, rows, dcp * width)
        selected = batch.keys[layer] >= topk.selection_border(together, width)
        counts = selected.cumsum(-1)
        places = torch.where(selected, counts + batch.before_first, batch.spare_place).view(-1)
        batch.selected_rows[layer].scatter_(0, places, batch.flat[layer].view(-1))
        batch.selected_positions[layer].scatter_(0, places, batch.positions[layer].view(-1))
        batch.valid[layer].copy_(counts[..., -1])

    def _append_places(self, position: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Rows of a layer's whole tensor (int64 [R * B]) for the batch's own tokens; of other ranks: spare ones."""
        geometry = self.geometry
        own = self._flat_rows(cache.local(position[:, None].clamp(min=0), geometry), tables)[:, 0]
        mine = (cache.owner(position, geometry) == self._numbers) & (position != PADDING)  # (R, B)
        spare_row = self.rows_a_rank - geometry.page_stride_rows
        return (own.expand(mine.shape).masked_fill(~mine, spare_row) + self._first_rows).view(-1)

    def _candidates(
        self, shape: StepShape, workload: BatchWorkload, tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """keys, flat and positions of `DeviceBatch`."""
        geometry = self.geometry
        indices = torch.arange(shape.candidates, device=self.device)
        # A rank's positions start at its number times the interleave, and are else alike.
        starts = (self._numbers * geometry.interleave)[:, :, None]
        positions = cache.position(indices, 0, geometry) + starts  # (R, 1, S)
        visible = positions <= workload.rows.position[:, None]  # (R, B, S)
        flat = self._flat_rows(indices.expand(shape.rows, -1), tables)  # (B, S)
        salts = self.salts[:, flat]  # (R, B, S)
        at_once = max(1, SCORES_AT_ONCE // salts.numel())
        made = []
        for first in range(0, self.layers, at_once):
            scores = workload.index_scores(slice(first, first + at_once), positions, salts)  # (some layers, R, B, S)
            made.append(topk.batch_candidates(scores, positions, visible, geometry.topk))
        keys, chosen = (torch.cat(parts) for parts in zip(*made, strict=True))
        return (
            keys,
            flat.to(torch.int32).expand(*chosen.shape[:-1], -1).gather(-1, chosen),
            topk.key_positions(keys).to(torch.int32),
        )

    def _flat_rows(self, local_indices: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Flat rows (int64 [B, n]) of local indices int64 [B, n] under page tables int64 [B, pages]."""
        page = (local_indices // PAGE_TOKENS).clamp_(0, tables.shape[1] - 1)
        return tables.gather(1, page) * self.geometry.page_stride_rows + local_indices % PAGE_TOKENS


class DeviceRank:
    """One of a group's ranks, number `index` of the local ones, as `step.verify_layer` runs it."""

    def __init__(self, group: DeviceGroup, index: int, stages: CpuStages | GpuStages) -> None:
        self.group = group
        self.index = index
        self.stages = stages
        self.geometry = group.geometry
        self.rank = stages.rank
        self.cache = group.cache.part(index * group.rows_a_rank, group.rows_a_rank)
        self.salts = group.salts[index]

    def prefill(self, layer: int, request: RequestState, table: torch.Tensor) -> None:
        """Write the rows of a request's prompt that this rank stores. table: its pages, int64 on the device."""
        workload = self.group.workload
        count = cache.local_count(request.context, self.rank, self.geometry)
        for start in range(0, count, PREFILL_ROWS):
            indices = torch.arange(start, min(start + PREFILL_ROWS, count), device=table.device)
            positions = cache.position(indices, self.rank, self.geometry)
            flat = cache.flat_rows(table, indices, self.geometry)
            salts = torch.zeros_like(positions)
            self.salts.index_copy_(0, flat, salts)
            self.cache.write(layer, flat, workload.key_bytes(layer, request.index, positions, salts))

    def append(self, layer: int, batch: DeviceBatch) -> None:
        """Store the KV rows of the batch's own tokens: those of all local ranks, with the first of them."""
        if self.index == 0:
            self.group.cache.write(layer, batch.own_rows, batch.encoded[layer])

    def local_topk(self, layer: int, batch: DeviceBatch) -> torch.Tensor:
        """This rank's best candidates of every row: int64 keys [B, K]."""
        return batch.keys[layer, self.index]

    def select(self, layer: int, batch: DeviceBatch) -> Selection:
        """Merge the ranks' candidates; the tensors returned are filled when the last local rank does so."""
        self.group.receive(self.stages.receive(batch.size), layer, batch)
        return batch.selection(layer, self.index)

    def queries(self, layer: int, batch: DeviceBatch) -> torch.Tensor:
        """Own heads' queries, BF16 [B, H, 576]."""
        return batch.queries[layer, self.index]
