"""Static choices of the warpgroup decode (`warpgroup`), and the reasons for refusing some: wgmma, so sm_90a only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_refusal import RefusalReason, SparseRefusal, refuse_common
from dcp_decode.kernels.warpgroup_shared import WARPGROUPS, WarpgroupLayout
from dcp_decode.mailbox import MailboxLayout

COMPUTE_WARPS = 4 * WARPGROUPS
QUERY_WARPS = 4  # a warpgroup that waits for the query words, fences and re-arms beside the others
HEAD_STEP = 8  # N of wgmma grows by
MAX_HEAD_ROWS = 32  # more spill, and ptxas then waits for every wgmma
SPLITS = (1, 2, 4, 8)
MAX_CLUSTER = 8  # CTAs; more are not portable
CHUNKS = (64, 128, 256)


@dataclass(frozen=True)
class WarpgroupConfig:
    """Everything the kernel is specialised for. Two configs that are equal share one compiled kernel.

    geometry, batch, push, trigger, pdl: as in `SparseConfig`. head_rows: query heads of one CTA. split: CTAs of a
    cluster, over which a row's keys are dealt. chunk: keys of a CTA between two updates of the running maximum.
    groups: head groups (CTAs of different heads of a row) of a cluster, which load their keys together, each key once.
    split and chunk choose the `family`; head_rows, groups, trigger and pdl change no bit.
    """

    geometry: Geometry
    batch: int
    push: bool = True
    head_rows: int = 32
    split: int = 1
    chunk: int = 256
    groups: int = 1
    trigger: str = "merge"
    pdl: bool = True

    architectures: ClassVar[tuple[str, ...]] = ("sm_90a",)
    compute_warps: ClassVar[int] = COMPUTE_WARPS
    query_warps: ClassVar[int] = QUERY_WARPS
    first_query_warp: ClassVar[int] = COMPUTE_WARPS
    threads: ClassVar[int] = 32 * (COMPUTE_WARPS + QUERY_WARPS)
    staged_threads: ClassVar[int] = threads  # that meet at the named barrier QUERY_STAGED
    query_threads: ClassVar[int] = 32 * QUERY_WARPS

    @property
    def family(self) -> str:
        """Of configurations that share every bit: an entry of `oracle.FAMILIES`."""
        return f"warpgroup_{self.split}x{self.chunk}"

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.split, self.geometry.heads // self.head_rows, self.batch)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (self.split, self.groups, 1)

    @property
    def mailbox(self) -> MailboxLayout:
        return MailboxLayout(self.geometry)

    @property
    def shared(self) -> WarpgroupLayout:
        """Shared memory of a CTA."""
        return WarpgroupLayout(self.head_rows, self.split, self.chunk)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.shared.nbytes

    @property
    def name(self) -> str:
        """Of the variant, for tables and file names."""
        route = "push" if self.push else "local"
        parts = [f"b{self.batch}", f"h{self.geometry.heads}", route, f"{self.head_rows}x{self.split}x{self.chunk}"]
        parts += [f"groups{self.groups}"] * (self.groups > 1)
        parts += [self.trigger] * (self.trigger != "merge")
        return "warpgroup_" + "_".join(parts)

    def refusal(self) -> SparseRefusal | None:
        """None when the kernel can run this configuration, else why not."""
        rows = self.head_rows
        if rows % HEAD_STEP or not HEAD_STEP <= rows <= MAX_HEAD_ROWS:
            return SparseRefusal(RefusalReason.HEAD_ROWS, f"heads of a CTA {rows}")
        if self.split not in SPLITS:
            return SparseRefusal(RefusalReason.SPLIT, f"CTAs {self.split}")
        if self.chunk not in CHUNKS:
            return SparseRefusal(RefusalReason.CHUNK, f"keys {self.chunk}, must be {' or '.join(map(str, CHUNKS))}")
        if self.groups < 1 or self.split * self.groups > MAX_CLUSTER:
            return SparseRefusal(RefusalReason.GROUPS, f"CTAs {self.split}, head groups {self.groups}")
        refusal = refuse_common(self)
        if refusal is None and self.geometry.heads // rows % self.groups:
            return SparseRefusal(RefusalReason.GROUPS, f"head groups {self.groups} of {self.geometry.heads // rows}")
        return refusal
