"""One DCP rank's sparse stage on a GPU, with the peers' mailboxes in the same process (loopback)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from poison import poison_shared_memory

from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.launch import run_sparse
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.sparse_layout import DecodeConfig
from dcp_decode.mailbox import Mailbox, MailboxLayout, Stage

DEADLINE_NANOSECONDS = 5_000_000_000  # nothing is late here, but the GPU may be shared
POISON_BYTE = 0xFF


@dataclass
class Inputs:
    """What one step reads: query uint8 [B, heads, 576], cache uint8 [N, 576], rows int32 [B, K], valid int32 [B]."""

    query: torch.Tensor
    cache: torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor


@dataclass
class Outputs:
    """What one step wrote. out: BF16 [B, heads, 512]; lse: FP32 [B, heads], base 2 of the push route, else natural."""

    out: torch.Tensor
    lse: torch.Tensor

    def bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out.view(torch.int16), self.lse.view(torch.int32)

    def same_bits(self, other: Outputs) -> bool:
        return all(bool(torch.equal(mine, theirs)) for mine, theirs in zip(self.bits(), other.bits(), strict=True))


def random_e4m3(shape: tuple[int, ...], generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """E4M3 bytes (uint8, `shape`) of normal values times `scale`."""
    values = torch.randn(shape, generator=generator, device=generator.device) * scale
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def make_inputs(
    geometry: Geometry, counts: list[int], seed: int, cache_rows: int = 16384, query_scale: float = 16.0
) -> Inputs:
    """Rows of distinct random keys; the tail of `rows` is -1, which no kernel may dereference.

    Bytes times the scales (1/16) make queries and keys of unit variance.
    """
    generator = torch.Generator(device="cuda").manual_seed(seed)
    query = random_e4m3((len(counts), geometry.heads, 576), generator, query_scale)
    cache = random_e4m3((cache_rows, 576), generator, 16.0)
    picks = [torch.randperm(cache_rows, generator=generator, device="cuda")[: geometry.topk] for _ in counts]
    rows = torch.stack(picks).to(torch.int32)
    for row, count in enumerate(counts):
        rows[row, count:] = -1
    return Inputs(query, cache, rows, torch.tensor(counts, dtype=torch.int32, device="cuda"))


class SparseRank:
    """Mailboxes of all D ranks, of which `rank` runs the kernel; the test plays the query and merge stages."""

    def __init__(self, geometry: Geometry, rank: int = 0) -> None:
        self.geometry = geometry
        self.layout = MailboxLayout(geometry)
        memories = LoopbackFabric(geometry.dcp, "cuda").allocate(self.layout.nbytes)
        self.mailboxes = [Mailbox(self.layout, memory) for memory in memories]
        for mailbox in self.mailboxes:
            mailbox.arm()
        self.rank = rank
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    @property
    def mailbox(self) -> Mailbox:
        return self.mailboxes[self.rank]

    @property
    def generation(self) -> int:
        return int(self.mailbox.use_counter(Stage.SPARSE)) % self.geometry.generations

    def put_query(self, query: torch.Tensor) -> None:
        """All ranks' queries arrive for the coming use."""
        section = self.layout.query.view(self.mailbox.memory.local)
        section[self.generation, : query.shape[0], : self.geometry.heads] = query

    def query_is_armed(self) -> bool:
        return bool((self.layout.query.view(self.mailbox.memory.local) == 0xFF).all())

    def take_partials(self, batch: int) -> Outputs:
        """The rows that `rank` pushed into all owners' mailboxes for this use, gathered by head."""
        payload, lse = [], []
        for mailbox in self.mailboxes:
            region = mailbox.memory.local
            payload.append(self.layout.payload.view(region)[self.generation, self.rank, :batch])
            lse.append(self.layout.lse_log2.view(region)[self.generation, self.rank, :batch])
        return Outputs(torch.cat(payload, 1), torch.cat(lse, 1))

    def rearm_values(self) -> None:
        for mailbox in self.mailboxes:
            region = mailbox.memory.local
            self.layout.payload.view(region).view(torch.uint8).fill_(0xFF)
            self.layout.lse_log2.view(region).view(torch.uint8).fill_(0xFF)

    def finish_use(self) -> None:
        """What the merge stage does to this stage's counter."""
        self.mailbox.use_counter(Stage.SPARSE).add_(1)

    def launch(
        self,
        config: DecodeConfig,
        inputs: Inputs,
        local: Outputs | None = None,
        deadline_nanoseconds: int = DEADLINE_NANOSECONDS,
    ) -> None:
        """Enqueue the kernel on the rank's stream; `local` [B, padded, ..] are the outputs of the local route."""
        run_sparse(
            compile_sparse(config),
            self.mailbox,
            inputs.cache,
            inputs.rows,
            inputs.valid,
            None if local is None else local.out,
            None if local is None else local.lse,
            deadline_nanoseconds,
            self.stream.cuda_stream,
        )

    def local_outputs(self, batch: int) -> Outputs:
        """Poisoned outputs of the local route."""
        shape = (batch, self.geometry.padded_heads)
        out = torch.full((*shape, 1024), POISON_BYTE, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
        lse = torch.full((*shape, 4), POISON_BYTE, dtype=torch.uint8, device="cuda").view(torch.float32)
        return Outputs(out, lse[..., 0])

    def step(self, config: DecodeConfig, inputs: Inputs) -> Outputs:
        """One whole use on poisoned shared memory: queries arrive, the kernel runs, its rows are taken."""
        batch = config.batch
        self.put_query(inputs.query)
        local = None if config.push else self.local_outputs(batch)
        torch.cuda.synchronize()
        poison_shared_memory(self.stream.cuda_stream)
        self.launch(config, inputs, local)
        torch.cuda.synchronize()
        if local is None:
            taken = self.take_partials(batch)
        else:
            heads = self.geometry.heads
            assert bool((local.out[:, heads:].view(torch.int16) == -1).all()), "padded head rows were written"
            assert bool((local.lse[:, heads:].view(torch.int32) == -1).all()), "padded head rows were written"
            taken = Outputs(local.out[:, :heads].clone(), local.lse[:, :heads].clone())
        self.finish_use()
        return taken
