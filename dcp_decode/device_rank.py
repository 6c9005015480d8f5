"""A rank whose verify step is made of static shapes on its device: no size, address or branch depends on the step.

    host, one copy a step       device, captured once a shape
    integers of the step  --->  rows, page tables --> own keys, queries of all layers
                                       |
                                       +--> candidate places [B, S] --a layer--> scores --> top-k --> rows, valid

`S` is a bucket: every rank scores the positions that a page table of `pages` pages could hold, and masks those behind
a row's own. Rows of padding have position -1: they see nothing, select nothing and append to a spare page.

Salts (who is the token at a position?) lie beside the cache, one a flat row, so that they are paged like the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcp_decode import cache, topk
from dcp_decode.batch_workload import BatchRows, BatchWorkload
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.geometry import PAGE_TOKENS, Geometry
from dcp_decode.service import NEVER_WRITTEN, RequestState, VerifyRow
from dcp_decode.step import Selection
from dcp_decode.workload import Workload

if TYPE_CHECKING:
    from dcp_decode.kernels.stages import GpuStages

PADDING = -1  # position of a row of padding
NEEDLE_ROWS = 2  # of the needle test before a run, as far as the mailbox has rows
PREFILL_ROWS = 1 << 16  # rows made at once: 290 MB of intermediates


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
        """int64 of a step: request, position, salt and turn of every row, then a page table a request."""
        return 4 * self.rows + self.requests * self.pages

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.requests} requests, {self.candidates} positions a rank"


def step_shape(rows: tuple[VerifyRow, ...], rows_a_request: int, geometry: Geometry) -> StepShape:
    """The bucket of a step: requests and pages rounded up to powers of two, as far as the mailbox has rows."""
    requests = len(rows) // rows_a_request
    longest = max(row.position for row in rows) + 1
    fitting = min(_power_of_two(requests), geometry.capacity // rows_a_request)
    return StepShape(fitting, rows_a_request, _power_of_two(cache.pages_needed(longest, geometry)))


def step_batches(rows_a_request: int, geometry: Geometry) -> tuple[int, ...]:
    """Every B that a run launches kernels for, ascending: of its steps' shapes, and of its needle test."""
    most = geometry.capacity // rows_a_request
    steps = {min(_power_of_two(requests), most) * rows_a_request for requests in range(1, most + 1)}
    return tuple(sorted(steps | {min(NEEDLE_ROWS, geometry.capacity)}))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def write_integers(
    shape: StepShape, rows: tuple[VerifyRow, ...], tables: dict[int, np.ndarray], integers: np.ndarray
) -> None:
    """Fill the step's integers (int64 [shape.integers]). tables: int64 page table of each request of the rows."""
    columns = integers[: 4 * shape.rows].reshape(4, shape.rows)
    columns[1, len(rows) :] = PADDING
    columns[:3, : len(rows)] = np.array([(row.request, row.position, row.salt) for row in rows]).T
    columns[3] = np.arange(shape.rows) // shape.rows_a_request
    pages = integers[4 * shape.rows :].reshape(shape.requests, shape.pages)
    for turn, row in enumerate(rows[:: shape.rows_a_request]):
        table = tables[row.request][: shape.pages]
        pages[turn, : len(table)] = table


class DeviceBatch:
    """A step's rows on the device, and what all ranks of this process make of them: own keys and queries.

    integers: int64 [shape.integers] on the device, as `write_integers` has it. heads: those of the local ranks.
    """

    def __init__(self, shape: StepShape, integers: torch.Tensor, workload: Workload, layers: int, heads: range) -> None:
        self.shape = shape
        request, position, salt, self.turn = integers[: 4 * shape.rows].view(4, shape.rows)
        self.rows = BatchRows(request, position, salt)
        tables = integers[4 * shape.rows :].view(shape.requests, shape.pages)
        self.tables = tables.index_select(0, self.turn)  # (B, pages)
        self.workload = BatchWorkload(workload, layers, self.rows)
        self.values = workload.decode_keys(self.workload.keys())  # (layers, B, 576) BF16
        self.heads = heads
        self.queries = self.workload.queries(heads)  # (layers, B, heads, 576) BF16

    @property
    def size(self) -> int:
        return self.shape.rows

    def flat_rows(self, local_indices: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Flat rows (int64 [B, n]) of local indices int64 [B, n] under each row's page table."""
        page = (local_indices // PAGE_TOKENS).clamp_(0, self.shape.pages - 1)
        return self.tables.gather(1, page) * geometry.page_stride_rows + local_indices % PAGE_TOKENS


class DeviceRank:
    """What one rank holds through a run: cache and salts on its device, and its stages.

    flat_cache: one page more than the pool hands out; rows of padding are written there.
    """

    def __init__(
        self, geometry: Geometry, workload: Workload, flat_cache: cache.FlatCache, stages: CpuStages | GpuStages
    ) -> None:
        self.geometry = geometry
        self.workload = workload
        self.cache = flat_cache
        self.stages = stages
        self.rank = stages.rank
        rows = flat_cache.rows[0]
        self.device = rows.device
        self.salts = torch.full((len(rows),), NEVER_WRITTEN, dtype=torch.int64, device=self.device)
        self._spare_row = len(rows) - geometry.page_stride_rows

    def prefill(self, layer: int, request: RequestState, table: torch.Tensor) -> None:
        """Write the rows of a request's prompt that this rank stores. table: its pages, int64 on the device."""
        count = cache.local_count(request.context, self.rank, self.geometry)
        for start in range(0, count, PREFILL_ROWS):
            indices = torch.arange(start, min(start + PREFILL_ROWS, count), device=self.device)
            positions = cache.position(indices, self.rank, self.geometry)
            flat = cache.flat_rows(table, indices, self.geometry)
            salts = torch.zeros_like(positions)
            self.salts.index_copy_(0, flat, salts)
            self.cache.write(layer, flat, self.workload.key_bytes(layer, request.index, positions, salts))

    def begin(self, batch: DeviceBatch) -> None:
        """What all layers of a step share: where its own tokens go, and which keys its rows may select."""
        geometry, rows = self.geometry, batch.rows
        own = batch.flat_rows(cache.local(rows.position[:, None].clamp(min=0), geometry), geometry)[:, 0]
        mine = (cache.owner(rows.position, geometry) == self.rank) & (rows.position != PADDING)
        self._own_rows = own.masked_fill(~mine, self._spare_row)
        self.salts.index_copy_(0, self._own_rows, rows.salt)
        indices = torch.arange(batch.shape.candidates, device=self.device)
        self._positions = cache.position(indices, self.rank, geometry)  # (S)
        self._visible = self._positions <= rows.position[:, None]  # (B, S)
        places = batch.flat_rows(indices.expand(batch.size, -1), geometry)
        self._salts = self.salts[places]  # (B, S)

    def append(self, layer: int, batch: DeviceBatch) -> None:
        """Quantize and store the KV rows of the batch's own tokens; those of other ranks go to the spare page."""
        self.cache.append(layer, self._own_rows, batch.values[layer])

    def local_topk(self, layer: int, batch: DeviceBatch) -> torch.Tensor:
        """This rank's best candidates of every row: int64 keys [B, K]."""
        scores = batch.workload.index_scores(layer, self._positions, self._salts)
        return topk.batch_candidates(scores, self._positions, self._visible, self.geometry.topk)

    def select(self, batch: DeviceBatch) -> Selection:
        """Merge the ranks' candidates and look the own ones up in the page tables."""
        positions = self.stages.select(batch.size)
        flat = batch.flat_rows(cache.local(positions.clamp(min=0), self.geometry), self.geometry)
        rows, valid = topk.compact_rows(positions, flat)
        return Selection(positions, rows, valid)

    def queries(self, layer: int, batch: DeviceBatch) -> torch.Tensor:
        """Own heads' queries, BF16 [B, H, 576]."""
        first = self.rank * self.geometry.owner_heads - batch.heads.start
        return batch.queries[layer][:, first : first + self.geometry.owner_heads].contiguous()
