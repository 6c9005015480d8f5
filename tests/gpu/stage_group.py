"""All D virtual ranks of a group on one GPU: the three stages as kernels, launched stage by stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from poison import poison_shared_memory
from sparse_rank import DEADLINE_NANOSECONDS

from dcp_decode import numerics, oracle
from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.configs import QueryConfig, ValueConfig
from dcp_decode.kernels.launch import run_query, run_sparse, run_value, run_value_push
from dcp_decode.kernels.query import compile_query
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.sparse_layout import sparse_config
from dcp_decode.kernels.value import compile_value, compile_value_push
from dcp_decode.mailbox import Mailbox, MailboxLayout, Stage


@dataclass
class GroupInputs:
    """One use: query bf16 [D, B, H, 576]; cache u8 [D, N, 576]; rows int32 [D, B, K]; valid int32 [D, B]."""

    query: torch.Tensor
    cache: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor


def make_group_inputs(geometry: Geometry, counts: list[list[int]], seed: int, cache_rows: int = 4096) -> GroupInputs:
    """Normal queries and keys; counts[rank][row] keys of a row on a rank, tails -1."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    batch = len(counts[0])
    query = torch.randn(geometry.dcp, batch, geometry.owner_heads, 576, generator=generator, device="cuda")
    keys = torch.randn(geometry.dcp, cache_rows, 576, generator=generator, device="cuda")
    cache = numerics.quantize_e4m3(keys, geometry.k_scale)
    rows = torch.full((geometry.dcp, batch, geometry.topk), -1, dtype=torch.int32, device="cuda")
    for rank, many in enumerate(counts):
        for row, count in enumerate(many):
            picked = torch.randperm(cache_rows, generator=generator, device="cuda")[:count]
            rows[rank, row, :count] = picked.to(torch.int32)
    valid = torch.tensor(counts, dtype=torch.int32, device="cuda")
    return GroupInputs(query.to(torch.bfloat16), cache, rows, valid)


class StageGroup:
    """Mailboxes and compiled kernels of one geometry, batch and route; `poison`: fill shared memory before stages."""

    def __init__(self, geometry: Geometry, batch: int, push: bool = True, poison: bool = True, **choices) -> None:
        self.geometry, self.batch, self.push, self.poison = geometry, batch, push, poison
        self.layout = MailboxLayout(geometry)
        memories = LoopbackFabric(geometry.dcp, "cuda").allocate(self.layout.nbytes)
        self.mailboxes = [Mailbox(self.layout, memory) for memory in memories]
        for mailbox in self.mailboxes:
            mailbox.arm()
        self.stream = torch.cuda.Stream()
        self.query_kernel = compile_query(QueryConfig(geometry, batch))
        self.sparse_kernel = compile_sparse(sparse_config(geometry, batch, push, **choices))
        self.value_kernel = compile_value(ValueConfig(geometry, batch, push))
        self.push_kernel = None if push else compile_value_push(ValueConfig(geometry, batch, push))
        shape = (geometry.dcp, batch, geometry.padded_heads)
        self.latent = torch.full((*shape, 1024), 0xFF, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
        self.lse_ln = torch.full((*shape, 4), 0xFF, dtype=torch.uint8, device="cuda").view(torch.float32)[..., 0]
        self.lse_ln = self.lse_ln.contiguous()
        self.merged = torch.empty(
            geometry.dcp, batch, geometry.owner_heads, numerics.LATENT_DIM, dtype=torch.bfloat16, device="cuda"
        )
        torch.cuda.synchronize()

    def push_queries(self, inputs: GroupInputs, skip: int | None = None) -> None:
        """Stage 1 of every rank but `skip`."""
        for mailbox in self.mailboxes:
            if mailbox.rank != skip:
                run_query(self.query_kernel, mailbox, inputs.query[mailbox.rank], self.stream.cuda_stream)

    def decode(self, inputs: GroupInputs, deadline: int = DEADLINE_NANOSECONDS) -> None:
        """Stage 2 of every rank, and 3a on the local route."""
        for mailbox in self.mailboxes:
            rank = mailbox.rank
            if self.poison:
                poison_shared_memory(self.stream.cuda_stream)
            run_sparse(
                self.sparse_kernel,
                mailbox,
                inputs.cache[rank],
                inputs.rows[rank],
                inputs.valid[rank],
                None if self.push else self.latent[rank],
                None if self.push else self.lse_ln[rank],
                deadline,
                self.stream.cuda_stream,
            )
        if self.push_kernel is not None:
            for mailbox in self.mailboxes:
                rank = mailbox.rank
                run_value_push(self.push_kernel, mailbox, self.latent[rank], self.lse_ln[rank], self.stream.cuda_stream)

    def merge(self, deadline: int = DEADLINE_NANOSECONDS) -> None:
        """Stage 3 of every rank."""
        for mailbox in self.mailboxes:
            run_value(self.value_kernel, mailbox, self.merged[mailbox.rank], deadline, self.stream.cuda_stream)

    def enqueue(self, inputs: GroupInputs) -> None:
        """One whole use on the group's stream."""
        self.push_queries(inputs)
        self.decode(inputs)
        self.merge()

    def step(self, inputs: GroupInputs) -> torch.Tensor:
        """One use on poisoned outputs: merged rows bf16 [D, B, H, 512]."""
        self.merged.view(torch.int16).fill_(-1)
        torch.cuda.synchronize()
        self.enqueue(inputs)
        torch.cuda.synchronize()
        return self.merged.clone()

    def value_bytes(self) -> list[torch.Tensor]:
        """Copies of every rank's value mailbox (payload, then LSE), uint8."""
        start = self.layout.payload.offset
        return [mailbox.memory.local[start:].clone() for mailbox in self.mailboxes]

    def check_as_new(self, uses: int) -> None:
        """All mailboxes armed, no wait expired, every counter where `uses` uses leave it."""
        for mailbox in self.mailboxes:
            assert int(mailbox.abort_word) == 0
            assert bool((mailbox.memory.local[self.layout.topk.offset :] == 0xFF).all())
            assert int(mailbox.use_counter(Stage.QUERY)) == uses
            assert int(mailbox.use_counter(Stage.SPARSE)) == uses
            assert int(mailbox.use_counter(Stage.MERGE)) == uses - 1

    def verdict(self, merged: torch.Tensor, inputs: GroupInputs) -> list[oracle.Verdict]:
        """Every owner's merged rows against oracle and twin."""
        verdicts = []
        bytes_by_owner = [numerics.quantize_e4m3(query, self.geometry.q_scale) for query in inputs.query]
        for owner, query in enumerate(bytes_by_owner):
            parts = [
                oracle.walk_partial(
                    query, inputs.cache[source], inputs.rows[source], inputs.valid[source], self.geometry
                )
                for source in range(self.geometry.dcp)
            ]
            verdicts.append(oracle.verify_merged(merged[owner], oracle.merge_partials(parts)))
        return verdicts
