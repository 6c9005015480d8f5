"""A group of ranks of the CPU stages over fabric `loopback`, and inputs for one use of it with chosen key counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dcp_decode import numerics, oracle
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import CONTROL_BYTES, Mailbox, MailboxLayout, Stage

ROUTES = ("push", "local")
# BF16 keeps 8 significant bits: neighbours differ by 2**-7 of the power of two below.
BF16_STEP = 2.0**-7


@dataclass(frozen=True)
class Inputs:
    """One use: query BF16 [B, heads, 576]; per rank a cache uint8 [N, 576], rows int32 [B, K] and valid int32 [B]."""

    query: torch.Tensor
    caches: tuple[torch.Tensor, ...]
    rows: tuple[torch.Tensor, ...]
    valid: tuple[torch.Tensor, ...]

    @property
    def batch(self) -> int:
        return len(self.query)

    def take(self, index: list[int]) -> Inputs:
        """The batch rows `index`, in that order, over the same caches."""
        return replace(
            self,
            query=self.query[index],
            rows=tuple(rows[index] for rows in self.rows),
            valid=tuple(valid[index] for valid in self.valid),
        )


@dataclass(frozen=True)
class Result:
    """merged BF16 [B, heads, 512] of all owners; what the owners found in their value mailboxes before the merge:
    payload int32 [owner, D, B, H, 256] (armed words for empty rows), lse_log2 FP32 [owner, D, B, H]."""

    merged: torch.Tensor
    payload: torch.Tensor
    lse_log2: torch.Tensor


def make_inputs(geometry: Geometry, counts: list[list[int]], seed: int = 0) -> Inputs:
    """Inputs in which rank s holds counts[s][row] keys of a row; cache rows that no row selects are NaN bytes."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(counts[0])
    query = torch.randn(batch, geometry.heads, numerics.ROW_BYTES, generator=generator).to(torch.bfloat16)
    caches, all_rows = [], []
    for own in counts:
        total = sum(own)
        cache = torch.full((2 * total + 5, numerics.ROW_BYTES), numerics.E4M3_NAN, dtype=torch.uint8)
        places = torch.randperm(len(cache), generator=generator)[:total]
        keys = torch.randn(total, numerics.ROW_BYTES, generator=generator)
        cache[places] = numerics.quantize_e4m3(keys, geometry.k_scale)
        rows = torch.full((batch, geometry.topk), -1, dtype=torch.int32)
        for row, part in enumerate(places.split(own)):
            rows[row, : own[row]] = part
        caches.append(cache)
        all_rows.append(rows)
    valid = tuple(torch.tensor(own, dtype=torch.int32) for own in counts)
    return Inputs(query, tuple(caches), tuple(all_rows), valid)


class Group:
    """All ranks of a geometry in this process; `run` is one use of their mailboxes, without the top-k exchange."""

    def __init__(self, geometry: Geometry, deadline_seconds: float = 20.0, stages: type[CpuStages] = CpuStages) -> None:
        self.geometry = geometry
        self.layout = MailboxLayout(geometry)
        self.mailboxes = [
            Mailbox(self.layout, one) for one in LoopbackFabric(geometry.dcp).allocate(self.layout.nbytes)
        ]
        for mailbox in self.mailboxes:
            mailbox.arm()
        self.ranks = [stages(mailbox, deadline_seconds) for mailbox in self.mailboxes]
        self.uses = 0

    def push_queries(self, query: torch.Tensor, ranks: list[int] | None = None) -> None:
        """Stage 1 of some ranks (None: all)."""
        h = self.geometry.owner_heads
        for rank in range(self.geometry.dcp) if ranks is None else ranks:
            self.ranks[rank].query_push(query[:, rank * h : (rank + 1) * h])

    def decode(self, inputs: Inputs, route: str, ranks: list[int] | None = None) -> None:
        """Stage 2 of some ranks, and 3a on the local route."""
        for rank in range(self.geometry.dcp) if ranks is None else ranks:
            selection = inputs.caches[rank], inputs.rows[rank], inputs.valid[rank]
            if route == "push":
                self.ranks[rank].sparse_decode_push(*selection)
            else:
                self.ranks[rank].value_push(self.ranks[rank].sparse_decode_local(*selection))

    def run(self, inputs: Inputs, route: str = "push") -> Result:
        generation = self.uses % self.geometry.generations
        self.uses += 1
        self.push_queries(inputs.query)
        self.decode(inputs, route)
        regions = [mailbox.memory.local for mailbox in self.mailboxes]
        payload = [self.layout.payload.words(region)[generation, :, : inputs.batch].clone() for region in regions]
        lse = [self.layout.lse_log2.view(region)[generation, :, : inputs.batch].clone() for region in regions]
        after = Stage.SPARSE if route == "push" else Stage.PUSH
        merged = [stages.merge(inputs.batch, after) for stages in self.ranks]
        return Result(torch.cat(merged, dim=1), torch.stack(payload), torch.stack(lse))

    def armed_as_new(self) -> bool:
        """Whether every mailbox byte of every rank is 0xFF again."""
        return all(bool((one.memory.local[CONTROL_BYTES:] == numerics.ARMED_BYTE).all()) for one in self.mailboxes)


def verify(inputs: Inputs, merged: torch.Tensor, geometry: Geometry) -> None:
    """All heads against the FP64 oracle and the twin. Raises WrongResult."""
    counts = torch.stack(inputs.valid)  # (D, B)
    longest = max(1, int(counts.sum(0).max()))
    keys = torch.zeros(inputs.batch, longest, numerics.ROW_BYTES, dtype=torch.uint8)
    source = torch.full((inputs.batch, longest), -1, dtype=torch.int64)
    for row in range(inputs.batch):
        start = 0
        for rank, count in enumerate(counts[:, row].tolist()):
            keys[row, start : start + count] = inputs.caches[rank][inputs.rows[rank][row, :count].long()]
            source[row, start : start + count] = rank
            start += count
    encoded = numerics.quantize_e4m3(inputs.query, geometry.q_scale)
    oracle.verify_rows(merged, encoded, keys, source, geometry).require("group")


def bits(rows: torch.Tensor) -> torch.Tensor:
    """BF16 as int16, so that equal means bitwise equal (NaNs and the sign of zero included)."""
    return rows.contiguous().view(torch.int16)
