"""Static choices of the sparse decode kernel, and typed reasons for refusing a geometry.

`exchange` says what the CTAs of a cluster send each other: "partials", FP32 sums over their keys (family `seed`), or
"probabilities", E4M3 P of their keys, so that every CTA sums its own latent columns over all keys of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dcp_decode.geometry import HEAD_TILE, Geometry
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES, RefusalReason, SparseRefusal, refuse_common
from dcp_decode.kernels.sparse_shared import BLOCK, SPLIT, PartialsLayout, ProbabilitiesLayout, SharedLayout
from dcp_decode.mailbox import MailboxLayout

FAMILY = "seed"
WARPS = 16  # warps that gather, compute and merge in the exchange of partials
COMPUTE_WARPS = 8  # in the exchange of probabilities: fewer, or the instructions that all repeat would bound it
GATHER_WARPS = 4  # there, of a one-tile CTA; wide ones have half as many of these and the next
QUERY_WARPS = 4  # a warp group that waits for the query words, fences and re-arms beside the others

MAX_TILES = 3
MAX_GROUPS = 2  # clusters of 8 CTAs, the most that every GPU runs
EXCHANGE_CHUNKS = {"partials": (BLOCK,), "probabilities": (BLOCK, 2 * BLOCK)}
EXCHANGES = tuple(EXCHANGE_CHUNKS)


@dataclass(frozen=True)
class SparseConfig:
    """Everything the kernel is specialised for. Two configs that are equal share one compiled kernel.

    geometry: shapes and mailbox layout. batch: rows B of the grid, at most the capacity.
    push: rows go to their owners' value mailboxes (else latent and natural-log LSE stay on this rank).
    tiles: 16-head tiles of a CTA over the same keys. bulk: partials move as one bulk copy a peer CTA.
    buffers: key buffers; 2 gathers a chunk while the one before is computed.
    trigger: when the next kernel may be launched: at the "start", before the "merge" or at the "end" (it still waits
    for this one's completion before it reads anything). pdl: programmatic dependent launch.
    exchange: what the CTAs of a cluster exchange; it chooses the `family`.
    groups: CTAs of adjacent head tiles in a cluster, which copy the first keys and values once for all of them; more
    than one needs the exchange of probabilities and one tile.
    chunk: keys of a CTA between two updates of its running maximum, 64 or, with the exchange of probabilities and one
    buffer, 128. It chooses the `family` too.
    None of tiles, bulk, buffers, trigger, pdl and groups changes a bit of the result.
    """

    geometry: Geometry
    batch: int
    push: bool = True
    tiles: int = 1
    bulk: bool = False
    buffers: int = 2
    trigger: str = "merge"
    pdl: bool = True
    exchange: str = "partials"
    groups: int = 1
    chunk: int = BLOCK

    split: ClassVar[int] = SPLIT
    architectures: ClassVar[tuple[str, ...]] = ARCHITECTURES

    @property
    def family(self) -> str:
        """Of configurations that share every bit: an entry of `oracle.FAMILIES`."""
        if self.exchange == "partials":
            return FAMILY
        return "probabilities" if self.blocks == 1 else f"probabilities_{self.chunk}"

    @property
    def blocks(self) -> int:
        """Of a chunk."""
        return self.chunk // BLOCK

    @property
    def head_rows(self) -> int:
        """Query heads of one CTA."""
        return HEAD_TILE * self.tiles

    @property
    def grid(self) -> tuple[int, int, int]:
        return (SPLIT, self.geometry.heads // self.head_rows, self.batch)

    @property
    def cluster(self) -> tuple[int, int, int]:
        return (SPLIT, self.groups, 1)

    @property
    def mailbox(self) -> MailboxLayout:
        return MailboxLayout(self.geometry)

    @property
    def shared(self) -> SharedLayout:
        """Shared memory of a CTA, of the chosen exchange."""
        return self.partials_layout if self.exchange == "partials" else self.probabilities_layout

    @property
    def partials_layout(self) -> PartialsLayout:
        return PartialsLayout(self.tiles, self.buffers)

    @property
    def probabilities_layout(self) -> ProbabilitiesLayout:
        return ProbabilitiesLayout(self.tiles, self.buffers, self.blocks)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.shared.nbytes

    @property
    def compute_warps(self) -> int:
        """Warps of scores, softmax, values and outputs."""
        return WARPS if self.exchange == "partials" else COMPUTE_WARPS

    @property
    def gather_warps(self) -> int:
        """Warps beside them that only gather keys and values."""
        if self.exchange == "partials":
            return 0
        return GATHER_WARPS if self.tiles == 1 else GATHER_WARPS // 2

    @property
    def query_warps(self) -> int:
        """Warps beside them that serve the query only. Wide CTAs need the registers for their sums: none with the
        exchange of partials, where all 16 warps serve it, and half as many with that of probabilities."""
        if self.tiles == 1:
            return QUERY_WARPS
        return 0 if self.exchange == "partials" else QUERY_WARPS // 2

    @property
    def staged_threads(self) -> int:
        """Threads that meet at the named barrier QUERY_STAGED."""
        return 32 * (self.compute_warps + self.query_warps)

    @property
    def first_query_warp(self) -> int:
        """The query warps are the last ones."""
        return self.compute_warps + self.gather_warps

    @property
    def threads(self) -> int:
        return 32 * (self.first_query_warp + self.query_warps)

    @property
    def query_threads(self) -> int:
        """Threads that poll: the query warps, or all of a wide CTA."""
        return 32 * (self.query_warps or self.compute_warps)

    @property
    def name(self) -> str:
        """Of the variant, for tables and file names."""
        parts = [f"b{self.batch}", f"h{self.geometry.heads}", "push" if self.push else "local", f"t{self.tiles}"]
        parts += ["p"] * (self.exchange == "probabilities") + [f"groups{self.groups}"] * (self.groups > 1)
        parts += [f"chunk{self.chunk}"] * (self.chunk != BLOCK) + ["bulk"] * self.bulk
        parts += ["single"] * (self.buffers == 1) + [self.trigger] * (self.trigger != "merge")
        return "sparse_" + "_".join(parts)

    def refusal(self) -> SparseRefusal | None:
        """None when the kernel can run this configuration, else why not."""
        if self.buffers not in (1, 2):
            return SparseRefusal(RefusalReason.BUFFERS, f"key buffers {self.buffers}")
        if self.exchange not in EXCHANGES or (self.bulk and self.exchange != "partials"):
            return SparseRefusal(RefusalReason.EXCHANGE, f"exchange {self.exchange}, bulk {self.bulk}")
        if self.chunk not in EXCHANGE_CHUNKS[self.exchange]:
            allowed = " or ".join(map(str, EXCHANGE_CHUNKS[self.exchange]))
            return SparseRefusal(RefusalReason.CHUNK, f"keys {self.chunk}, must be {allowed}")
        if self.tiles < 1:
            return SparseRefusal(RefusalReason.TILES, f"tiles {self.tiles}")
        refusal = refuse_common(self)
        if refusal is not None:
            return refusal
        if self.groups != 1 and (self.exchange != "probabilities" or self.tiles != 1):
            detail = f"head groups {self.groups}: only with one tile and the exchange of probabilities"
            return SparseRefusal(RefusalReason.GROUPS, detail)
        if not 1 <= self.groups <= MAX_GROUPS or self.grid[1] % self.groups:
            return SparseRefusal(RefusalReason.GROUPS, f"head groups {self.groups} of {self.grid[1]}")
        if self.tiles > MAX_TILES:
            return SparseRefusal(RefusalReason.TILES, f"tiles {self.tiles}")
        if not self.shared.overlay_fits:
            return SparseRefusal(RefusalReason.SHARED_MEMORY, f"tiles {self.tiles}: staged partials")
        return None
