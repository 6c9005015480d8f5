"""Fused chains on one GPU: one rank whose peers' words are there already, or small ranks that run side by side."""

from __future__ import annotations

import torch
from sparse_rank import DEADLINE_NANOSECONDS
from stage_group import GroupInputs, StageGroup

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.chain import compile_chain
from dcp_decode.kernels.chain_config import chain_config
from dcp_decode.kernels.launch import run_chain
from dcp_decode.mailbox import Mailbox, Section, Stage

DECODE = {"exchange": "probabilities", "chunk": 128}  # of a chain in a run


class ChainGroup(StageGroup):
    """A group that runs a use as fused chains, every rank on a stream of its own; stages are still there to compare."""

    def __init__(self, geometry: Geometry, batch: int, poison: bool = True, **choices) -> None:
        super().__init__(geometry, batch, True, poison, **(DECODE | choices))
        self.chain_kernel = compile_chain(chain_config(geometry, batch, **(DECODE | choices)))
        self.streams = [torch.cuda.Stream() for _ in self.mailboxes]

    def launch(self, rank: int, inputs: GroupInputs, deadline: int = DEADLINE_NANOSECONDS) -> None:
        """One rank's chain on its stream."""
        run_chain(
            self.chain_kernel,
            self.mailboxes[rank],
            inputs.query[rank],
            inputs.cache[rank],
            inputs.rows[rank],
            inputs.valid[rank],
            self.merged[rank],
            deadline,
            self.streams[rank].cuda_stream,
        )

    def step_fused(self, inputs: GroupInputs) -> torch.Tensor:
        """One use of all ranks at once, on poisoned outputs: merged rows bf16 [D, B, H, 512]."""
        self.merged.view(torch.int16).fill_(-1)
        torch.cuda.synchronize()
        for mailbox in self.mailboxes:
            self.launch(mailbox.rank, inputs)
        torch.cuda.synchronize()
        return self.merged.clone()


class PushedWords:
    """What all ranks have pushed in one use, seen in the mailboxes of a group that runs stage by stage."""

    def __init__(self, group: StageGroup, inputs: GroupInputs) -> None:
        self.layout = group.layout
        self.generation = int(group.mailboxes[0].use_counter(Stage.QUERY)) % group.geometry.generations
        group.push_queries(inputs)
        torch.cuda.synchronize()
        self.query = [self._words(self.layout.query, mailbox) for mailbox in group.mailboxes]
        torch.cuda.synchronize()  # copied, before the decode on another stream re-arms them
        group.decode(inputs)
        torch.cuda.synchronize()
        self.payload = [self._words(self.layout.payload, mailbox) for mailbox in group.mailboxes]
        self.lse = [self._words(self.layout.lse_log2, mailbox) for mailbox in group.mailboxes]
        torch.cuda.synchronize()
        group.merge()
        torch.cuda.synchronize()
        self.merged = group.merged.clone()

    def _words(self, section: Section, mailbox: Mailbox) -> torch.Tensor:
        return section.words(mailbox.memory.local)[self.generation].clone()

    def put(self, mailbox: Mailbox, sources: list[int]) -> None:
        """Write what these ranks push, credits included, into a mailbox of the same use."""
        g, region = self.layout.geometry, mailbox.memory.local
        query = self.layout.query.words(region)[self.generation]
        payload = self.layout.payload.words(region)[self.generation]
        lse = self.layout.lse_log2.words(region)[self.generation]
        credit = self.layout.credit.words(region)[self.generation]
        for source in sources:
            heads = slice(source * g.owner_heads, (source + 1) * g.owner_heads)
            query[:, heads] = self.query[mailbox.rank][:, heads]
            payload[source] = self.payload[mailbox.rank][source]
            lse[source] = self.lse[mailbox.rank][source]
            credit[source] = 0
