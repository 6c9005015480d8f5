"""DCP ranks on one GPU, for timing: whatever another rank would push is in the mailboxes before the kernels start.

*solo*: one rank runs, on several mailbox regions; the peers' regions only take what is pushed to them. *loopback*: all
ranks run, stage by stage, and every copy has all their regions.

Before every replay `prepare` lays the words of the sources that don't run here into two generations of every region,
arms the rest and sets the use counters. So each launch finds its words arrived, and re-arms them as in a step. A chain
goes over the regions twice, first in one generation, then in the other; a stage alone, whose counter stands still, goes
over them once. Cold: L2 is evicted before that, so exchange words are in L2 as after a peer's push, while keys and row
numbers are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dcp_decode import numerics
from dcp_decode.checkpoint.inputs import L2Eviction, Problem
from dcp_decode.checkpoint.timing import Subject
from dcp_decode.checkpoint.variants import timed_alone
from dcp_decode.errors import WaitFailed
from dcp_decode.fabric.memory import SymmetricMemory
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.chain import compile_chain
from dcp_decode.kernels.chain_config import chain_config, chain_for
from dcp_decode.kernels.configs import QueryConfig, ValueConfig
from dcp_decode.kernels.launch import run_chain, run_query, run_sparse, run_value, run_value_push
from dcp_decode.kernels.query import compile_query
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.sparse_layout import DecodeConfig
from dcp_decode.kernels.value import compile_value, compile_value_push
from dcp_decode.mailbox import ABORT_OFFSET, CONTROL_BYTES, Mailbox, MailboxLayout, Section, Stage
from dcp_decode.waits import read_record

Launch = Callable[[int], None]

SOLO_RANK = 3
DEADLINE_NANOSECONDS = 200_000_000
USED_GENERATIONS = 2  # that a chain goes through


def region_bytes_in_use(geometry: Geometry, batch: int) -> int:
    """Bytes of one rank's region that B rows go through: query words, payload and LSE of both generations."""
    query = batch * geometry.heads * numerics.ROW_BYTES
    return USED_GENERATIONS * (query + geometry.dcp * batch * geometry.owner_heads * (2 * numerics.LATENT_DIM + 4))


@dataclass(frozen=True)
class _Image:
    """What `prepare` writes into every measuring rank's region: control words, and two generations of sections."""

    control: torch.Tensor
    sections: tuple[tuple[Section, torch.Tensor], ...]


class BenchRanks:
    """The measuring ranks of a problem: all of its geometry's (loopback) or SOLO_RANK (solo).

    A copy is one region of each; layer i uses copy i modulo their number, which is half that of the problem's layers.
    """

    def __init__(self, problem: Problem, ranks: tuple[int, ...], eviction: L2Eviction) -> None:
        self.problem, self.ranks, self.eviction = problem, ranks, eviction
        g = self.geometry = problem.geometry
        device = self.device = problem.caches.device
        self.batch = problem.shape.batch
        self.layout = MailboxLayout(g)
        generator = torch.Generator(device=device).manual_seed(2)
        self.copies = problem.layers // USED_GENERATIONS
        self.regions = torch.empty(self.copies, len(ranks), self.layout.nbytes, dtype=torch.uint8, device=device)
        # One region each, for all copies, of the ranks that don't run here.
        others = set(range(g.dcp)) - set(ranks)
        self.sinks = {rank: torch.empty_like(self.regions[0, 0]) for rank in sorted(others)}
        self.mailboxes = self._mailboxes()
        self.query = [problem.query[:, self.own_heads(rank)].contiguous() for rank in ranks]
        shape = (len(ranks), g.dcp, self.batch, g.owner_heads)
        # What the sources that don't run here would have pushed.
        self.payload = torch.randn((*shape, 512), generator=generator, device=device).to(torch.bfloat16)
        self.lse_log2 = torch.randn(shape, generator=generator, device=device)
        merged = (len(ranks), self.batch, g.owner_heads, numerics.LATENT_DIM)
        self.merged = torch.empty(merged, dtype=torch.bfloat16, device=device)
        # What the sparse decode of the local route leaves.
        latent = (len(ranks), self.batch, g.padded_heads, numerics.LATENT_DIM)
        self.latent = torch.randn(latent, device=device).to(torch.bfloat16)
        self.lse_ln = torch.randn((len(ranks), self.batch, g.padded_heads), device=device)
        self.expired = torch.zeros(self.copies, len(ranks), dtype=torch.int32, device=device)
        self._alone = self._image(set(range(g.dcp)), chain=False)
        self._chained = self._image(others, chain=True)
        self._fused = self._image(others, chain=True, credits=True)
        self.regions.fill_(numerics.ARMED_BYTE)
        self.regions[..., :CONTROL_BYTES] = 0
        self.synchronize()

    def own_heads(self, rank: int) -> slice:
        """Gathered heads that a rank owns."""
        return slice(rank * self.geometry.owner_heads, (rank + 1) * self.geometry.owner_heads)

    def mailboxes_of(self, layer: int) -> list[Mailbox]:
        """Those of the measuring ranks in the copy that a layer uses."""
        return self.mailboxes[layer % self.copies]

    def stages(self, config: DecodeConfig) -> dict[str, Launch]:
        """Launches of layer i by stage, of all measuring ranks, in stream order; `config` says route and pdl of all."""
        g, b, problem = self.geometry, self.batch, self.problem
        query = compile_query(QueryConfig(g, b, config.pdl))
        sparse = compile_sparse(config)
        value_config = ValueConfig(g, b, config.push, config.pdl)
        value = compile_value(value_config)

        def query_push(index: int, mailbox: Mailbox, _layer: int) -> None:
            run_query(query, mailbox, self.query[index], current_stream())

        def sparse_decode(index: int, mailbox: Mailbox, layer: int) -> None:
            latent, lse_ln = (None, None) if config.push else (self.latent[index], self.lse_ln[index])
            run_sparse(
                sparse, mailbox, problem.caches.e4m3, problem.rows_of(layer, index), problem.valid,
                latent, lse_ln, DEADLINE_NANOSECONDS, current_stream(),
            )  # fmt: skip

        def merge(index: int, mailbox: Mailbox, _layer: int) -> None:
            run_value(value, mailbox, self.merged[index], DEADLINE_NANOSECONDS, current_stream())

        stages = {"query_push": query_push, "sparse_decode": sparse_decode}
        if not config.push:
            value_push_kernel = compile_value_push(value_config)

            def value_push(index: int, mailbox: Mailbox, _layer: int) -> None:
                latent, lse_ln = self.latent[index], self.lse_ln[index]
                run_value_push(value_push_kernel, mailbox, latent, lse_ln, current_stream())

            stages["value_push"] = value_push
        stages["merge"] = merge
        return {name: self._on_all_ranks(launch) for name, launch in stages.items()}

    def subjects(self, config: DecodeConfig) -> list[Subject]:
        """Every stage alone (the sparse decode as `timed_alone`), and the chain of three."""
        stages = self.stages(config)
        sparse = self.stages(timed_alone(config))["sparse_decode"]

        def chain(layer: int) -> None:
            for launch in stages.values():
                launch(layer)

        launches = stages | {"sparse_decode": sparse}
        alone = [Subject(name, launch, self.prepare_alone, self.copies) for name, launch in launches.items()]
        return [*alone, Subject("chain", chain, self.prepare_chain)]

    def fused_subject(self) -> Subject | None:
        """The chain as one launch of a rank; None where it is refused: several ranks, too many rows, a small GPU."""
        g, b, problem = self.geometry, self.batch, self.problem
        if chain_for(g, b, len(self.ranks) == 1, multiprocessors(self.device)) is not None:
            return None
        kernel = compile_chain(chain_config(g, b, problem.shape.keys))

        def launch(layer: int) -> None:
            run_chain(
                kernel, self.mailboxes_of(layer)[0], self.query[0], problem.caches.e4m3, problem.rows_of(layer),
                problem.valid, self.merged[0], DEADLINE_NANOSECONDS, current_stream(),
            )  # fmt: skip

        return Subject("fused_chain", launch, self.prepare_fused)

    def _on_all_ranks(self, launch: Callable[[int, Mailbox, int], None]) -> Launch:
        """A stage of the measuring ranks, one after the other, from its launch for (rank's number, mailbox, layer)."""

        def launch_all(layer: int) -> None:
            for index, mailbox in enumerate(self.mailboxes_of(layer)):
                launch(index, mailbox, layer)

        return launch_all

    def prepare_alone(self) -> None:
        """All sources' words are there: for a stage alone."""
        self._prepare(self._alone)

    def prepare_chain(self) -> None:
        """The words of the sources that don't run here are there."""
        self._prepare(self._chained)

    def prepare_fused(self) -> None:
        """As for a chain, and the credit words that only the fused chain exchanges."""
        self._prepare(self._fused)

    def prepare_eviction(self) -> None:
        """Cold: L2 holds none of the keys. For work that reads no mailbox."""
        if self.problem.l2 == "cold":
            self.eviction.enqueue()

    def poison(self) -> None:
        """Fill what launches must write with 0xFF: outputs, and the regions of ranks that don't run here."""
        for rows in (self.merged, self.latent, self.lse_ln):
            rows.view(torch.uint8).fill_(numerics.ARMED_BYTE)
        for sink in self.sinks.values():
            sink.fill_(numerics.ARMED_BYTE)

    def synchronize(self) -> None:
        """Wait for everything enqueued on the ranks' device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def require_no_expired_wait(self, label: str) -> None:
        """Raises WaitFailed if a wait expired in any launch so far, with who waited if it was since `prepare`."""
        self._note_expired()
        if bool(self.expired.any()):
            records = [read_record(mailbox) for mailboxes in self.mailboxes for mailbox in mailboxes]
            waits = [wait for wait in records if wait is not None]
            who = "".join(f"; {wait}" for wait in waits)
            raise WaitFailed(f"{label}: a mailbox wait expired{who}", [wait.as_dict() for wait in waits])

    def _prepare(self, image: _Image) -> None:
        self.prepare_eviction()
        self._note_expired()
        self.regions[..., :CONTROL_BYTES] = image.control
        for section, content in image.sections:
            size = content.shape[-1]
            self.regions[..., section.offset : section.offset + size] = content

    def _note_expired(self) -> None:
        words = self.regions[..., ABORT_OFFSET : ABORT_OFFSET + 4].view(torch.int32)[..., 0]
        torch.maximum(self.expired, words, out=self.expired)

    def _image(self, present: set[int], chain: bool, credits: bool = False) -> _Image:
        g, b = self.geometry, self.batch
        image = torch.full_like(self.regions[0], numerics.ARMED_BYTE)
        image[:, :CONTROL_BYTES] = 0
        for index in range(len(self.ranks)):
            if chain:  # the query push advances it to 0 before the merge reads it
                offset = self.layout.use_counter_offset(Stage.MERGE)
                image[index, offset : offset + 4].view(torch.int32).fill_(-1)
            for source in present:
                heads = self.own_heads(source)
                used = slice(USED_GENERATIONS)
                self.layout.query.view(image[index])[used, :b, heads] = self.problem.query_bytes[:, heads]
                self.layout.payload.view(image[index])[used, source, :b] = self.payload[index, source]
                self.layout.lse_log2.view(image[index])[used, source, :b] = self.lse_log2[index, source]
                if credits:
                    self.layout.credit.view(image[index])[used, source] = 0

        def used_part(section: Section) -> torch.Tensor:
            nbytes = section.nbytes // g.generations * USED_GENERATIONS
            return image[:, section.offset : section.offset + nbytes].clone()

        sections = (self.layout.query, self.layout.payload, self.layout.lse_log2, self.layout.credit)
        return _Image(image[:, :CONTROL_BYTES].clone(), tuple((one, used_part(one)) for one in sections))

    def _mailboxes(self) -> list[list[Mailbox]]:
        """By copy and measuring rank."""
        mailboxes = []
        for own in self.regions:
            by_rank = self.sinks | dict(zip(self.ranks, own, strict=True))
            regions = tuple(by_rank[rank] for rank in range(self.geometry.dcp))
            table = torch.tensor([region.data_ptr() for region in regions], dtype=torch.int64, device=self.device)
            mailboxes.append([Mailbox(self.layout, SymmetricMemory(rank, regions, table)) for rank in self.ranks])
        return mailboxes


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def current_stream() -> int:
    """Handle of the current CUDA stream."""
    return torch.cuda.current_stream().cuda_stream
