"""The chains of a group's rank: over the fabric's mailbox as three kernels or one, and as three kernels over NCCL.

    pushed    query push ------------> sparse decode ------------> merge        kernels store into the peers' mailboxes
    fused     the same in one launch, which waits for words of its peers where the three wait for a kernel's end
    NCCL      query push, all-gather > sparse decode, all-to-all > merge        kernels store into buffers of this GPU

The fused chain costs less over NVLink than the three kernels do: each of those begins when all that the kernel before
it has stored is acknowledged, peers' memory included, a round trip of the wire where the words themselves need one way.

NCCL's chain is spared every copy: it gathers the query words where the sparse decode reads them, row by row in one
group call, and sends each owner's rows from where the sparse decode has left them to where the merge reads them. Of the
forms that were timed (us a layer, two H200s, 5 rows of 48 own heads) these are the fastest:

    query     five all-gathers in one call 10.5     one of packed rows 6.8, and two copies of 2.8
    partials  two sends a peer in one call 15.3     one all-to-all of packed rows 10.1, and four copies; two 15.2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.inputs import Problem
from dcp_decode.checkpoint.peers.nccl_exchange import NcclExchange
from dcp_decode.checkpoint.ranks import current_stream, multiprocessors
from dcp_decode.checkpoint.variants import default_config
from dcp_decode.fabric.memory import SymmetricMemory, address_table
from dcp_decode.kernels.aot import architecture_of
from dcp_decode.kernels.chain import compile_chain
from dcp_decode.kernels.chain_config import chain_config, chain_for
from dcp_decode.kernels.configs import QueryConfig, ValueConfig
from dcp_decode.kernels.launch import run_chain, run_query, run_sparse, run_value
from dcp_decode.kernels.query import compile_query
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.value import compile_value
from dcp_decode.mailbox import ABORT_OFFSET, Mailbox, MailboxLayout

STAGES = ("query_push", "sparse_decode", "merge")
AfterStage = Callable[[], None]


class Layers(Protocol):
    """What can be timed layer by layer."""

    def launch(self, layer: int) -> None:
        """Enqueue layer i on the current stream."""

    def rewind(self) -> None:
        """Enqueue what must stand before layer 0 when it is launched again."""


class GroupChain:
    """A rank's part of a layer on its mailbox: layer after layer, generations flip as in a model.

    name: of the stage that it is timed as. family: of its sparse decode.
    """

    name: str
    family: str

    def __init__(self, problem: Problem, mailbox: Mailbox, deadline_nanoseconds: int) -> None:
        geometry, batch = problem.geometry, problem.shape.batch
        self.problem, self.mailbox, self.deadline = problem, mailbox, deadline_nanoseconds
        first = mailbox.rank * geometry.owner_heads
        self.query = problem.query[:, first : first + geometry.owner_heads].contiguous()
        shape = (batch, geometry.owner_heads, numerics.LATENT_DIM)
        self.merged = torch.empty(shape, dtype=torch.bfloat16, device=problem.caches.device)

    def launch(self, layer: int) -> None:
        """As of `Layers`."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Nothing: the kernels count their uses."""


class FusedChain(GroupChain):
    """One launch a layer."""

    name = "fused_chain"

    def __init__(self, problem: Problem, mailbox: Mailbox, deadline_nanoseconds: int) -> None:
        super().__init__(problem, mailbox, deadline_nanoseconds)
        config = chain_config(problem.geometry, problem.shape.batch, problem.shape.keys)
        self.family = config.sparse.family
        self.kernel = compile_chain(config)

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether a batch of these rows can be one launch on a GPU like this one."""
        processors = multiprocessors(problem.caches.device)
        return chain_for(problem.geometry, problem.shape.batch, True, processors) is None

    def launch(self, layer: int) -> None:
        problem = self.problem
        run_chain(
            self.kernel, self.mailbox, self.query, problem.caches.e4m3, problem.rows_of(layer), problem.valid,
            self.merged, self.deadline, current_stream(),
        )  # fmt: skip


class PushedChain(GroupChain):
    """Three kernels a layer."""

    name = "chain"

    def __init__(self, problem: Problem, mailbox: Mailbox, deadline_nanoseconds: int) -> None:
        super().__init__(problem, mailbox, deadline_nanoseconds)
        geometry, batch = problem.geometry, problem.shape.batch
        self.config = default_config(geometry, problem.shape, True, architecture_of(problem.caches.device))
        self.family = self.config.family
        self.kernels = (
            compile_query(QueryConfig(geometry, batch)),
            compile_sparse(self.config),
            compile_value(ValueConfig(geometry, batch)),
        )

    def launch(self, layer: int, after_stage: AfterStage = lambda: None) -> None:
        """after_stage: called behind each of STAGES."""
        query, sparse, value = self.kernels
        stream, problem = current_stream(), self.problem
        run_query(query, self.mailbox, self.query, stream)
        self._exchange_queries(layer)
        after_stage()
        run_sparse(
            sparse, self.mailbox, problem.caches.e4m3, problem.rows_of(layer), problem.valid, None, None,
            self.deadline, stream,
        )  # fmt: skip
        self._exchange_partials(layer)
        after_stage()
        run_value(value, self.mailbox, self.merged, self.deadline, stream)
        after_stage()

    def _exchange_queries(self, layer: int) -> None:
        """The query push has stored into the peers' mailboxes."""

    def _exchange_partials(self, layer: int) -> None:
        """So has the sparse decode."""


class NcclChain(PushedChain):
    """The same kernels on mailboxes of this GPU alone, and NCCL between them; collective.

    What NCCL moves is fixed when a graph is captured, so layer i must be use i, but for whole turns of generations.
    """

    def __init__(self, problem: Problem, rank: int, deadline_nanoseconds: int, nccl: NcclExchange) -> None:
        layout = MailboxLayout(problem.geometry)
        shape = (problem.geometry.dcp, layout.nbytes)
        regions = tuple(torch.empty(shape, dtype=torch.uint8, device=problem.caches.device))
        mailbox = Mailbox(layout, SymmetricMemory(rank, regions, address_table(regions)))
        mailbox.arm()
        super().__init__(problem, mailbox, deadline_nanoseconds)
        self.nccl = nccl
        self._first_use = mailbox.memory.local[:ABORT_OFFSET].clone()

    def rewind(self) -> None:
        """The next layer is use 0 again."""
        self.mailbox.memory.local[:ABORT_OFFSET].copy_(self._first_use)

    def _exchange_queries(self, layer: int) -> None:
        geometry, memory = self.problem.geometry, self.mailbox.memory
        words = self.mailbox.layout.query.view(memory.local)[layer % geometry.generations]
        gathered = [row[: geometry.heads].view(geometry.dcp, -1) for row in words[: self.problem.shape.batch]]
        self.nccl.gather([(rows, rows[memory.rank]) for rows in gathered])

    def _exchange_partials(self, layer: int) -> None:
        layout, memory, batch = self.mailbox.layout, self.mailbox.memory, self.problem.shape.batch
        generation = layer % self.problem.geometry.generations
        sections = [
            [section.view(region)[generation, :, :batch] for region in memory.regions]
            for section in (layout.payload, layout.lse_log2)
        ]
        peers = [peer for peer in range(len(memory.regions)) if peer != memory.rank]
        self.nccl.exchange(
            sent={peer: [section[peer][memory.rank] for section in sections] for peer in peers},
            received={peer: [section[memory.rank][peer] for section in sections] for peer in peers},
        )


class ExchangeAlone:
    """What NCCL does between the kernels of a problem, without them."""

    def __init__(self, problem: Problem, nccl: NcclExchange) -> None:
        self._launch = nccl.launcher(problem.geometry, problem.shape.batch)

    def launch(self, layer: int) -> None:
        self._launch(layer)

    def rewind(self) -> None:
        """Nothing: it has no state."""
