"""Mailboxes in symmetric memory: layout, arming and generations. The only place that computes a mailbox's offset.

Where a row lies inside one follows from its shape below; kernels compute that for their own registers.

One region a rank, the same layout on every rank (G generations, D ranks, K top-k width, H = heads / D):

| control | top-k candidates     | query bytes              | value payload            | value LSE          | credit
|         | [G, D, cap, K] i64   | [G, cap, padded, 576] u8 | [G, D, cap, H, 512] bf16 | [G, D, cap, H] f32 | [G, D] i32
  local     written by all ranks   written by all ranks       written by all ranks, slot = source rank
  words

The payload is its own arrival flag: a mailbox is armed with 0xFF bytes and a 32-bit word has arrived when it differs
from 0xFFFFFFFF (`numerics.ARMED_WORD`). Writers never store that word (`numerics` selects canonical NaNs; top-k keys
can't form it, see `topk.py`). The control words are touched by their own rank only: one use counter a stage, the
ticket of the fused chain, the sticky abort word and the record of the first wait that expired. A credit word carries
no data, only order: its source has re-armed all that it read in earlier uses (docs/protocol.md, section 6).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

import torch

from dcp_decode import numerics
from dcp_decode.fabric.memory import SymmetricMemory
from dcp_decode.geometry import Geometry

ALIGNMENT = 256
CONTROL_BYTES = 2048
COUNTER_STRIDE_BYTES = 128  # one cache line a counter: stages of one rank run on different SMs
TICKET_OFFSET = 896  # clusters of the fused chain that have read the use number; 0 between launches
ABORT_OFFSET = 1024
RECORD_OFFSET = 1152
RECORD_WORDS = 16


class Stage(enum.IntEnum):
    """Stages that use a mailbox, in stream order; the value numbers the use counter and the expired-wait record.

    The push route runs TOPK, QUERY, SPARSE, MERGE; the local route has PUSH (3a) before MERGE (3b).
    """

    TOPK = 0
    QUERY = 1
    SPARSE = 2
    PUSH = 3
    MERGE = 4


# Stage s + 1 increments the counter of stage s after its dependency wait, so the first stage of a use increments the
# last one's: that counter starts one lower.
INITIAL_USES = {Stage.TOPK: 0, Stage.QUERY: 0, Stage.SPARSE: 0, Stage.PUSH: 0, Stage.MERGE: -1}

# Field order of the expired-wait record, one int64 each.
RECORD_FIELDS = (
    "stage",
    "waiting_rank",
    "source_rank",
    "row",
    "head",
    "word",
    "use",
    "value_seen",
    "cta",
    "nanoseconds",
)


@dataclass(frozen=True)
class Section:
    """A typed array at a byte offset of every rank's region."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.dtype.itemsize

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """The section of a region (uint8, 1-D) as a tensor of `shape` and `dtype`."""
        return region[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)

    def words(self, region: torch.Tensor) -> torch.Tensor:
        """The same bytes as int32 words: `shape` with its last extent counted in words."""
        words_a_row = self.shape[-1] * self.dtype.itemsize // 4
        flat = region[self.offset : self.offset + self.nbytes].view(torch.int32)
        return flat.view(*self.shape[:-1], words_a_row)


@dataclass(frozen=True)
class MailboxLayout:
    """Byte offsets of every section of a rank's region for one geometry."""

    geometry: Geometry

    @cached_property
    def topk(self) -> Section:
        g = self.geometry
        return Section(CONTROL_BYTES, (g.generations, g.dcp, g.capacity, g.topk), torch.int64)

    @cached_property
    def query(self) -> Section:
        g = self.geometry
        shape = (g.generations, g.capacity, g.padded_heads, numerics.ROW_BYTES)
        return Section(_after(self.topk), shape, torch.uint8)

    @cached_property
    def payload(self) -> Section:
        g = self.geometry
        shape = (g.generations, g.dcp, g.capacity, g.owner_heads, numerics.LATENT_DIM)
        return Section(_after(self.query), shape, torch.bfloat16)

    @cached_property
    def lse_log2(self) -> Section:
        g = self.geometry
        shape = (g.generations, g.dcp, g.capacity, g.owner_heads)
        return Section(_after(self.payload), shape, torch.float32)

    @cached_property
    def credit(self) -> Section:
        return Section(_after(self.lse_log2), (self.geometry.generations, self.geometry.dcp), torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's whole region."""
        return _after(self.credit)

    @staticmethod
    def use_counter_offset(stage: Stage) -> int:
        """Byte offset of a stage's use counter (int32)."""
        return int(stage) * COUNTER_STRIDE_BYTES


def _after(section: Section) -> int:
    end = section.offset + section.nbytes
    return (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class Mailbox:
    """One rank's mailboxes over a fabric's symmetric memory, with views of its own and of every peer's sections."""

    def __init__(self, layout: MailboxLayout, memory: SymmetricMemory) -> None:
        if memory.nbytes < layout.nbytes:
            raise ValueError(f"symmetric memory of {memory.nbytes} bytes is smaller than the layout's {layout.nbytes}")
        self.layout = layout
        self.memory = memory
        self.rank = memory.rank

    @property
    def geometry(self) -> Geometry:
        return self.layout.geometry

    def arm(self) -> None:
        """Fill this rank's mailboxes with 0xFF and reset its control words.

        Once, before any peer may push: a control-plane barrier must follow before the first use.
        """
        region = self.memory.local
        region[CONTROL_BYTES:].fill_(numerics.ARMED_BYTE)
        region[:CONTROL_BYTES].zero_()
        for stage, first_use in INITIAL_USES.items():
            self.use_counter(stage).fill_(first_use)

    def use_counter(self, stage: Stage) -> torch.Tensor:
        """The stage's use counter, int32 scalar view in the mailbox's own memory."""
        offset = self.layout.use_counter_offset(stage)
        return self.memory.local[offset : offset + 4].view(torch.int32)[0]

    @property
    def abort_word(self) -> torch.Tensor:
        """Sticky int32: 0 while waits may go on, 1 once one has expired."""
        return self.memory.local[ABORT_OFFSET : ABORT_OFFSET + 4].view(torch.int32)[0]

    @property
    def record_words(self) -> torch.Tensor:
        """int64 [RECORD_WORDS]: the first expired wait, fields as in RECORD_FIELDS."""
        return self.memory.local[RECORD_OFFSET : RECORD_OFFSET + 8 * RECORD_WORDS].view(torch.int64)
