"""One verify step of one layer over the ranks that this process runs: the same few lines for every device.

    append own KV rows -> local top-k -> | top-k mailbox | -> select own rows
    -> query push -> | query mailbox | -> sparse decode -> | value mailbox | -> merge

Ranks that share a process (fabric `loopback`) run stage by stage, all ranks' one before any rank's next: no stage
then waits for a word that its own process has yet to push.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch

from dcp_decode import cache, topk
from dcp_decode.cpu.stages import CpuStages, LocalPartial
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import Stage
from dcp_decode.service import RequestState, VerifyRow
from dcp_decode.workload import Workload

if TYPE_CHECKING:
    from dcp_decode.kernels.stages import GpuStages

# Methods of LayerRun in stream order. `prepare` makes this layer's own queries: model work, not part of the exchange.
STAGES = {
    "push": ("append", "select_push", "select", "prepare", "query_push", "sparse_decode_push", "merge"),
    "local": ("append", "select_push", "select", "prepare", "query_push", "sparse_decode_local", "value_push", "merge"),
    "fused": ("append", "select_push", "select", "prepare", "fused_chain"),  # of the push route
}

# Stages whose times a run reports, by method, under the names of the results; `chain` is all of them.
TIMED = ("query_push", "sparse_decode", "merge", "chain")
TIMED_AS = {
    "query_push": "query_push",
    "sparse_decode_push": "sparse_decode",
    "sparse_decode_local": "sparse_decode",
    "value_push": "merge",
    "merge": "merge",
    "fused_chain": "chain",
}

# Called with a rank's layer and the stage's name before each stage of each rank: fault injection hooks in here.
BeforeStage = Callable[["LayerRun[Any]", str], None]
# Called with the stage's name once all local ranks have launched it.
AfterStage = Callable[[str], None]


@dataclass(frozen=True)
class Batch:
    """The rows of a verify step and the requests they belong to (by index, as they stand during the step)."""

    rows: tuple[VerifyRow, ...]
    requests: dict[int, RequestState]

    @property
    def size(self) -> int:
        """B: rows that the stages run, all of them real."""
        return len(self.rows)


@dataclass(frozen=True)
class Selection:
    """One rank's share of a layer's exact top-k: positions [B, K] (ascending prefix, tail -1), rows, valid."""

    positions: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor


AnyBatch = TypeVar("AnyBatch", bound="SizedBatch")
GivenBatch = TypeVar("GivenBatch", bound="SizedBatch", contravariant=True)


class SizedBatch(Protocol):
    """What every kind of batch has: B, the rows that the stages run."""

    @property
    def size(self) -> int: ...


class StepRank(Protocol[GivenBatch]):
    """What a layer's stages need of a rank, for one kind of batch: see `RankState`, and `DeviceRank`."""

    @property
    def rank(self) -> int: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def cache(self) -> cache.FlatCache: ...
    @property
    def stages(self) -> CpuStages | GpuStages: ...
    def append(self, layer: int, batch: GivenBatch) -> None: ...
    def local_topk(self, layer: int, batch: GivenBatch) -> torch.Tensor: ...
    def select(self, layer: int, batch: GivenBatch) -> Selection: ...
    def queries(self, layer: int, batch: GivenBatch) -> torch.Tensor: ...


class RankState:
    """What one rank holds through a run: its flat cache and its stages.

    workload: makes the rank's KV rows, queries and index scores. flat_cache: rows of all layers.
    """

    def __init__(self, geometry: Geometry, workload: Workload, flat_cache: cache.FlatCache, stages: CpuStages) -> None:
        self.geometry = geometry
        self.workload = workload
        self.cache = flat_cache
        self.stages = stages
        self.rank = stages.rank

    def prefill(self, layer: int, request: RequestState, chunk: int = 16384) -> None:
        """Write the rows of a request's prompt that this rank stores."""
        count = cache.local_count(request.context, self.rank, self.geometry)
        for start in range(0, count, chunk):
            indices = torch.arange(start, min(start + chunk, count))
            positions, flat = self._places(request, indices)
            keys = self.workload.key_bytes(layer, request.index, positions, request.salts[positions])
            self.cache.write(layer, flat, keys)

    def append(self, layer: int, batch: Batch) -> None:
        """Quantize and store the KV rows of the batch's own tokens, as far as this rank stores their positions."""
        for row in batch.rows:
            if cache.owner(row.position, self.geometry) != self.rank:
                continue
            indices = torch.tensor([cache.local(row.position, self.geometry)])
            positions, flat = self._places(batch.requests[row.request], indices)
            values = self.workload.key_rows(layer, row.request, positions, torch.tensor([row.salt]))
            self.cache.append(layer, flat, values)

    def local_topk(self, layer: int, batch: Batch) -> torch.Tensor:
        """This rank's best candidates of every row: int64 keys [B, K]."""
        lists = []
        for row in batch.rows:
            request = batch.requests[row.request]
            count = cache.local_count(row.position + 1, self.rank, self.geometry)
            positions = cache.position(torch.arange(count), self.rank, self.geometry)
            scores = self.workload.index_scores(
                layer, row.request, row.position, row.salt, positions, request.salts[positions]
            )
            lists.append(topk.local_candidates(scores, positions, self.geometry.topk))
        return torch.stack(lists)

    def select(self, layer: int, batch: Batch) -> Selection:
        """Merge the ranks' candidates and look the own ones up in the page tables."""
        positions = self.stages.select(len(batch.rows))
        flat = torch.empty_like(positions)
        for index, row in enumerate(batch.rows):
            local = cache.local(positions[index].clamp(min=0), self.geometry)
            pages = torch.tensor(batch.requests[row.request].pages)
            flat[index] = cache.flat_rows(pages, local, self.geometry)
        rows, valid = topk.compact_rows(positions, flat)
        return Selection(positions, rows, valid)

    def queries(self, layer: int, batch: Batch) -> torch.Tensor:
        """Own heads' queries, BF16 [B, H, 576]."""
        heads = own_heads(self.rank, self.geometry)
        made = [
            self.workload.queries(layer, row.request, torch.tensor([row.position]), torch.tensor([row.salt]), heads)
            for row in batch.rows
        ]
        return torch.cat(made)

    def _places(self, request: RequestState, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Global positions and flat rows (int64) of this rank's local indices of a request."""
        positions = cache.position(indices, self.rank, self.geometry)
        return positions, cache.flat_rows(torch.tensor(request.pages), indices, self.geometry)


def own_heads(rank: int, geometry: Geometry) -> range:
    """Gathered head numbers that a rank owns."""
    return range(rank * geometry.owner_heads, (rank + 1) * geometry.owner_heads)


@dataclass(frozen=True)
class LayerResult:
    """What a rank's layer left, on the host: all that verification needs of it.

    digest: SHA-256 of its merged rows, made on the device. merged: BF16 [B, H, 512]; valid: int32 [B]; positions: int64
    [B, K] as in `Selection`. Real rows only. family: of its sparse decode (`oracle.FAMILIES`).
    """

    rank: int
    layer: int
    family: str
    batch: Batch
    digest: bytes
    merged: torch.Tensor
    valid: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class StepResult:
    """What a whole step left on a device, on the host: of R local ranks, the layers one after the other.

    digests: SHA-256 of the merged rows of every (layer, rank). valid: int32 [layers, R, B], real rows only, a view that
    the next step overwrites. results: of every (layer, rank) if the step is verified, else none.
    """

    family: str
    digests: list[bytes]
    valid: np.ndarray
    results: list[LayerResult]


@dataclass
class LayerRun(Generic[AnyBatch]):
    """One rank's way through a layer: what its stages leave for each other, and for verification.

    selection: its share of the exact top-k. query: own heads' queries BF16 [B, H, 576]. merged: BF16 [B, H, 512].
    seconds: wall time of each stage, waits for peers included.
    """

    state: StepRank[AnyBatch]
    layer: int
    batch: AnyBatch
    selection: Selection = field(init=False)
    query: torch.Tensor = field(init=False)
    partial: LocalPartial = field(init=False)
    merged: torch.Tensor = field(init=False)
    after_partials: Stage = Stage.SPARSE
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.state.rank

    @property
    def family(self) -> str:
        """Of its sparse decode (`oracle.FAMILIES`)."""
        return self.state.stages.family(self.batch.size)

    @property
    def valid(self) -> torch.Tensor:
        return self.selection.valid

    @property
    def positions(self) -> torch.Tensor:
        return self.selection.positions

    def append(self) -> None:
        self.state.append(self.layer, self.batch)

    def select_push(self) -> None:
        self.state.stages.select_push(self.state.local_topk(self.layer, self.batch))

    def select(self) -> None:
        self.selection = self.state.select(self.layer, self.batch)

    def prepare(self) -> None:
        self.query = self.state.queries(self.layer, self.batch)

    def query_push(self) -> None:
        self.state.stages.query_push(self.query)

    def sparse_decode_push(self) -> None:
        self.state.stages.sparse_decode_push(self._cache, self.selection.rows, self.selection.valid)

    def sparse_decode_local(self) -> None:
        self.partial = self.state.stages.sparse_decode_local(self._cache, self.selection.rows, self.selection.valid)

    def value_push(self) -> None:
        self.state.stages.value_push(self.partial)
        self.after_partials = Stage.PUSH

    def merge(self) -> None:
        self.merged = self.state.stages.merge(self.batch.size, after=self.after_partials)

    def fused_chain(self) -> None:
        stages = cast("GpuStages", self.state.stages)  # those of a CPU fuse nothing
        self.merged = stages.fused_chain(self.query, self._cache, self.selection.rows, self.selection.valid)

    @property
    def _cache(self) -> torch.Tensor:
        return self.state.cache.rows[self.layer]


def timed_seconds(seconds: Mapping[str, float]) -> tuple[float, ...]:
    """A time for each of TIMED, from those of a layer's stages by method."""
    times = dict.fromkeys(TIMED, 0.0)
    for name, timed_as in TIMED_AS.items():
        for column in {timed_as, "chain"}:
            times[column] += seconds.get(name, 0.0)
    return tuple(times.values())


def verify_layer(
    ranks: Sequence[StepRank[AnyBatch]],
    layer: int,
    batch: AnyBatch,
    route: str,
    before_stage: BeforeStage | None = None,
    after_stage: AfterStage | None = None,
    fuse: bool = True,
) -> list[LayerRun[AnyBatch]]:
    """Run one layer of a verify step on all local ranks, by the stages of `route` ("push" or "local").

    Where all ranks have agreed to it, the stages from the query push on are one launch. fuse: False where somebody
    looks between them.
    """
    runs = [LayerRun(state, layer, batch) for state in ranks]
    fused = fuse and ranks[0].stages.fuses(batch.size)
    for name in STAGES["fused" if fused else route]:
        for run in runs:
            if before_stage is not None:
                before_stage(run, name)
            start = time.perf_counter()
            getattr(run, name)()
            run.seconds[name] = time.perf_counter() - start
        if after_stage is not None:
            after_stage(name)
    return runs
