"""One DCP rank alone on a GPU, for timing: every other rank's words are in its mailboxes before the kernels start.

A CUDA graph of n launches works on n copies of the rank's region, so that each launch finds words that have arrived and
re-arms them; between replays the copies are filled again. The time of a stage is the slope between graphs of two
lengths, which leaves the launch of the graph out. `cold` takes the keys of every launch from another part of a large
cache and flushes L2 before the mailboxes are filled: exchange words are in L2 then, as after a peer's push, while keys,
row numbers and outputs are not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_decode import numerics
from dcp_decode.fabric.memory import SymmetricMemory
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.configs import QueryConfig, ValueConfig
from dcp_decode.kernels.launch import run_query, run_sparse, run_value, run_value_push
from dcp_decode.kernels.query import compile_query
from dcp_decode.kernels.sparse import compile_sparse, sparse_config
from dcp_decode.kernels.value import compile_value, compile_value_push
from dcp_decode.mailbox import CONTROL_BYTES, Mailbox, MailboxLayout, Stage

CACHE_ROWS = 131_072
COLD_CACHES = 16  # 1.2 GB of keys: what one launch leaves in L2 is gone before the next one of its part
FLUSH_BYTES = 1 << 28
DEADLINE_NANOSECONDS = 200_000_000
LENGTHS = (4, 16)
WARM_UP = 3
RANK = 3


@dataclass(frozen=True)
class Samples:
    """Microseconds of one launch, one sample a pair of replays."""

    microseconds: tuple[float, ...]

    def as_dict(self) -> dict[str, float | int]:
        ordered = sorted(self.microseconds)

        def percentile(percent: float) -> float:
            return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]

        return {
            "p50_us": statistics.median(ordered),
            "p95_us": percentile(95),
            "p99_us": percentile(99),
            "samples": len(ordered),
        }


class SoloRank:
    """`LENGTHS[-1]` copies of rank 3's region at one measured point, with inputs and compiled kernels."""

    def __init__(
        self, geometry: Geometry, batch: int, keys: int, push: bool = True, cold: bool = False, pdl: bool = True
    ) -> None:
        self.geometry, self.batch, self.push, self.cold, self.pdl = geometry, batch, push, cold, pdl
        self.layout = MailboxLayout(geometry)
        self.copies = LENGTHS[-1]
        self.stream = torch.cuda.Stream()
        self.replays = 0
        device = "cuda"
        peers = [torch.empty(self.layout.nbytes, dtype=torch.uint8, device=device) for _ in range(geometry.dcp)]
        self.regions = torch.empty(self.copies, self.layout.nbytes, dtype=torch.uint8, device=device)
        bases = torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64).repeat(self.copies, 1)
        bases[:, RANK] = torch.tensor([region.data_ptr() for region in self.regions])
        self.tables = bases.to(device)
        self.mailboxes = []
        for copy in range(self.copies):
            regions = tuple(self.regions[copy] if rank == RANK else peer for rank, peer in enumerate(peers))
            self.mailboxes.append(Mailbox(self.layout, SymmetricMemory(RANK, regions, self.tables[copy])))
        generator = torch.Generator(device=device).manual_seed(1)
        shape = (batch, geometry.owner_heads, numerics.ROW_BYTES)
        self.query = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        all_heads = torch.randn((batch, geometry.heads, 576), generator=generator, device=device)
        self.query_bytes = numerics.quantize_e4m3(all_heads, geometry.q_scale)
        caches = COLD_CACHES if cold else 1
        self.cache = torch.empty(caches * CACHE_ROWS, numerics.ROW_BYTES, dtype=torch.uint8, device=device)
        for part in self.cache.split(CACHE_ROWS):
            values = torch.randn(CACHE_ROWS, numerics.ROW_BYTES, generator=generator, device=device)
            part.copy_(numerics.quantize_e4m3(values, geometry.k_scale))
        picks = [
            torch.randperm(CACHE_ROWS, generator=generator, device=device)[: geometry.topk]
            for _ in range(batch * (self.copies if cold else 1))
        ]
        rows = torch.stack(picks).to(torch.int32).view(-1, batch, geometry.topk)
        parts = torch.arange(rows.shape[0], device=device, dtype=torch.int32) % caches
        rows += parts[:, None, None] * CACHE_ROWS
        rows[:, :, keys:] = -1
        self.rows = rows
        self.valid = torch.full((batch,), keys, dtype=torch.int32, device=device)
        payload = torch.randn((geometry.dcp, batch, geometry.owner_heads, 512), generator=generator, device=device)
        self.payload = payload.to(torch.bfloat16)
        self.lse_log2 = torch.randn((geometry.dcp, batch, geometry.owner_heads), generator=generator, device=device)
        self.latent = torch.randn((batch, geometry.padded_heads, 512), device=device).to(torch.bfloat16)
        self.lse_ln = torch.randn((batch, geometry.padded_heads), device=device)
        self.merged = torch.empty((batch, geometry.owner_heads, 512), dtype=torch.bfloat16, device=device)
        self.flush = torch.empty(FLUSH_BYTES if cold else 0, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()

    def kernels(self, **choices: Any) -> dict[str, Callable[[int], None]]:
        """Launches on copy i of the stages of this route, by name, in stream order."""
        g, b, stream = self.geometry, self.batch, self.stream.cuda_stream
        query = compile_query(QueryConfig(g, b, self.pdl))
        sparse = compile_sparse(sparse_config(g, b, self.push, pdl=self.pdl, **choices))
        value = compile_value(ValueConfig(g, b, self.push, self.pdl))
        local = () if self.push else (self.latent, self.lse_ln)

        def rows(copy: int) -> torch.Tensor:
            return self.rows[copy % len(self.rows)]

        launches: dict[str, Callable[[int], None]] = {
            "query_push": lambda copy: run_query(query, self.mailboxes[copy], self.query, stream),
            "sparse_decode": lambda copy: run_sparse(
                sparse, self.mailboxes[copy], self.cache, rows(copy), self.valid, *(local or (None, None)),
                DEADLINE_NANOSECONDS, stream,
            ),
        }  # fmt: skip
        if not self.push:
            value_push = compile_value_push(ValueConfig(g, b, self.push, self.pdl))
            launches["value_push"] = lambda copy: run_value_push(
                value_push, self.mailboxes[copy], self.latent, self.lse_ln, stream
            )
        launches["merge"] = lambda copy: run_value(
            value, self.mailboxes[copy], self.merged, DEADLINE_NANOSECONDS, stream
        )
        return launches

    def arm(self, chain: bool) -> None:
        """Before the first replay. A stage alone finds its counter at 0 for ever, a chain counts its uses."""
        self.regions.fill_(numerics.ARMED_BYTE)
        self.regions[:, :CONTROL_BYTES].zero_()
        if chain:
            for mailbox in self.mailboxes:
                mailbox.use_counter(Stage.MERGE).fill_(-1)
        self.replays = 0

    def fill(self, chain: bool) -> None:
        """What the other ranks push before the next replay; a stage alone gets its own rank's words too."""
        g, b = self.geometry, self.batch
        if self.cold:
            self.flush.fill_(1)
        generation = self.replays % g.generations if chain else 0
        others = [rank for rank in range(g.dcp) if not (chain and rank == RANK)]
        query = self._all(self.layout.query)[:, generation, :b]
        payload = self._all(self.layout.payload)[:, generation]
        lse = self._all(self.layout.lse_log2)[:, generation]
        for rank in others:
            heads = slice(rank * g.owner_heads, (rank + 1) * g.owner_heads)
            query[:, :, heads] = self.query_bytes[:, heads]
            payload[:, rank, :b] = self.payload[rank]
            lse[:, rank, :b] = self.lse_log2[rank]
        self.replays += 1

    def _all(self, section: Any) -> torch.Tensor:
        flat = self.regions[:, section.offset : section.offset + section.nbytes]
        return flat.view(section.dtype).view(self.copies, *section.shape)

    def time(self, launches: Sequence[Callable[[int], None]], samples: int) -> Samples:
        """Slope between two graph lengths; several launches form a chain on one copy."""
        chain = len(launches) > 1
        times = []
        # Modules are loaded, and buffers touched, before a graph is captured.
        self.arm(chain)
        self.fill(chain)
        for launch in launches:
            torch.cuda.synchronize()
            launch(0)
        torch.cuda.synchronize()
        for length in LENGTHS:
            self.arm(chain)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for copy in range(length):
                    for launch in launches:
                        launch(copy)
            times.append([self._replay(graph, chain) for _ in range(WARM_UP + samples)][WARM_UP:])
            assert not bool(self._aborted()), "a wait expired while timing"
        spread = LENGTHS[1] - LENGTHS[0]
        # Sorted, so that a sample of the slope pairs replays of the same rank of luck.
        pairs = zip(sorted(times[0]), sorted(times[1]), strict=True)
        return Samples(tuple((long - short) / spread for short, long in pairs))

    def _replay(self, graph: torch.cuda.CUDAGraph, chain: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.fill(chain)
            begin.record(self.stream)
            graph.replay()
            end.record(self.stream)
        self.stream.synchronize()
        return begin.elapsed_time(end) * 1e3

    def _aborted(self) -> torch.Tensor:
        return torch.stack([mailbox.abort_word for mailbox in self.mailboxes]).any()
