"""Static choices of the sparse decode kernel, and typed reasons for refusing a geometry.

`exchange` says what the CTAs of a cluster send each other: "partials", FP32 sums over their keys (family `seed`), or
"probabilities", E4M3 P of their keys, so that every CTA sums its own latent columns over all keys of the row.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dcp_decode.errors import DcpDecodeError
from dcp_decode.geometry import HEAD_TILE, MAX_TOPK, Geometry
from dcp_decode.kernels.sparse_shared import MAX_SHARED_BYTES, SPLIT, PartialsLayout, ProbabilitiesLayout, SharedLayout
from dcp_decode.mailbox import MailboxLayout

FAMILY = "seed"
WARPS = 16  # warps that gather, compute and merge in the exchange of partials
COMPUTE_WARPS = 8  # in the exchange of probabilities: fewer, or the instructions that all repeat would bound it
GATHER_WARPS = 4  # there, of a one-tile CTA; wide ones have half as many of these and the next
QUERY_WARPS = 4  # a warp group that waits for the query words, fences and re-arms beside the others

MAX_TILES = 3
TRIGGERS = ("start", "merge", "end")
EXCHANGES = ("partials", "probabilities")
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


class RefusalReason(enum.Enum):
    """Why `SparseDcpDecode` can't run a configuration; the value is the sentence that a user reads."""

    HEADS = "query heads must be a multiple of 16 heads x tiles"
    TILES = "tiles must be 1, 2 or 3"
    SHARED_MEMORY = "a CTA of this many tiles and key buffers needs more shared memory than the GPU has"
    BATCH = "batch rows must be between 1 and the mailbox capacity"
    WIDTH = f"the top-k width must be between 1 and {MAX_TOPK}"
    BUFFERS = "key buffers must be 1 or 2"
    TRIGGER = "the trigger must be start, merge or end"
    EXCHANGE = "the exchange must be partials or probabilities (never bulk)"


@dataclass(frozen=True)
class SparseRefusal:
    """A typed refusal: the reason and the values that caused it."""

    reason: RefusalReason
    detail: str

    def __str__(self) -> str:
        return f"sparse decode: {self.reason.value} ({self.detail})"


class SparseRefused(DcpDecodeError):
    """`compile_sparse` was asked for a configuration that the kernel refuses; `refusal` says why."""

    def __init__(self, refusal: SparseRefusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


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
    None of tiles, bulk, buffers, trigger and pdl changes a bit of the result.
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

    @property
    def family(self) -> str:
        """Of configurations that share every bit: an entry of `oracle.FAMILIES`."""
        return FAMILY if self.exchange == "partials" else "probabilities"

    @property
    def head_rows(self) -> int:
        """Query heads of one CTA."""
        return HEAD_TILE * self.tiles

    @property
    def grid(self) -> tuple[int, int, int]:
        return (SPLIT, self.geometry.heads // self.head_rows, self.batch)

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
        return ProbabilitiesLayout(self.tiles, self.buffers)

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
        parts += ["p"] * (self.exchange == "probabilities")
        parts += ["bulk"] * self.bulk + ["single"] * (self.buffers == 1) + [self.trigger] * (self.trigger != "merge")
        return "sparse_" + "_".join(parts)


def can_implement(config: SparseConfig) -> SparseRefusal | None:
    """None when the kernel can run this configuration, else why not."""
    g = config.geometry
    if config.buffers not in (1, 2):
        return SparseRefusal(RefusalReason.BUFFERS, f"key buffers {config.buffers}")
    if config.trigger not in TRIGGERS:
        return SparseRefusal(RefusalReason.TRIGGER, config.trigger)
    if config.exchange not in EXCHANGES or (config.bulk and config.exchange != "partials"):
        return SparseRefusal(RefusalReason.EXCHANGE, f"exchange {config.exchange}, bulk {config.bulk}")
    if config.tiles < 1:
        return SparseRefusal(RefusalReason.TILES, f"tiles {config.tiles}")
    if g.heads % config.head_rows:
        return SparseRefusal(RefusalReason.HEADS, f"heads {g.heads}, tiles {config.tiles}")
    if not 1 <= config.batch <= g.capacity:
        return SparseRefusal(RefusalReason.BATCH, f"batch {config.batch}, capacity {g.capacity}")
    if not 1 <= g.topk <= MAX_TOPK:
        return SparseRefusal(RefusalReason.WIDTH, f"width {g.topk}")
    shared = config.shared
    if shared.nbytes > MAX_SHARED_BYTES:
        detail = f"tiles {config.tiles}, key buffers {config.buffers}: {shared.nbytes} of {MAX_SHARED_BYTES} bytes"
        return SparseRefusal(RefusalReason.SHARED_MEMORY, detail)
    if config.tiles > MAX_TILES:
        return SparseRefusal(RefusalReason.TILES, f"tiles {config.tiles}")
    if not shared.overlay_fits:
        return SparseRefusal(RefusalReason.SHARED_MEMORY, f"tiles {config.tiles}: staged partials")
    return None


# Relative time of a wave of CTAs by tiles: 5.2 / 8.6 / 10 us at 256 keys, 17.5 / 27 / 35 us at 2048 (H200).
WAVE_COST = {1: 1.0, 2: 1.65, 3: 1.95}
# Clusters of 4 CTAs, one CTA a multiprocessor, that run at once on 132 of them: 30 fit, 32 take two waves.
WAVE_CLUSTERS = 30


def sparse_layout(batch: int, heads: int, push: bool) -> tuple[int, bool]:
    """(head tiles of a CTA, bulk exchange) for a bucket of `batch` rows and `heads` query heads.

    A function of host data that all ranks agree on, never of counts on the device: the tiles whose waves of clusters
    cost least. Measured at 96 heads, 256 keys, tiles 1 / 2 / 3, us: B = 5: 5.2 / 7.7 / 9.7; 6: 9.7 / 8.6 / 9.7;
    8: 10.0 / 8.6 / 10.7; 16: 19.9 / 17.1 / 19.7; 40: 41.5 / 35.1 / 32.2. The bulk exchange was slower everywhere
    (5.55 against 5.15 us with one tile, 8.6 against 7.6 with two).
    """
    del push  # both routes take the same time
    allowed = [tiles for tiles in WAVE_COST if heads % (HEAD_TILE * tiles) == 0]

    def cost(tiles: int) -> float:
        clusters = batch * heads // (HEAD_TILE * tiles)
        return -(-clusters // WAVE_CLUSTERS) * WAVE_COST[tiles]

    return min(allowed, key=cost), False


def sparse_variants(geometry: Geometry, batch: int, push: bool = True) -> list[SparseConfig]:
    """Every configuration worth timing for this geometry and batch, the default one first."""
    configs = [
        SparseConfig(geometry, batch, push, tiles, bulk, buffers, exchange=exchange)
        for exchange in EXCHANGES
        for tiles in range(1, MAX_TILES + 1)
        for bulk in (False, True)
        for buffers in (2, 1)
    ]
    allowed = [config for config in configs if can_implement(config) is None]
    return list(dict.fromkeys([sparse_config(geometry, batch, push), *allowed]))


def sparse_for(geometry: Geometry, batch: int, push: bool = True) -> SparseRefusal | None:
    """None when a DCP batch of `batch` rows runs `SparseDcpDecode` in its default layout, else the typed reason."""
    return can_implement(sparse_config(geometry, batch, push))


def sparse_config(
    geometry: Geometry,
    batch: int,
    push: bool = True,
    tiles: int | None = None,
    bulk: bool | None = None,
    buffers: int | None = None,
    trigger: str = "merge",
    pdl: bool = True,
    exchange: str = "partials",
) -> SparseConfig:
    """The configuration that `sparse_layout` chooses, with any of its choices given instead."""
    default_tiles, default_bulk = sparse_layout(batch, geometry.heads, push)
    chosen_tiles = default_tiles if tiles is None else tiles
    # Three tiles leave no room for a second key buffer.
    chosen_buffers = (2 if chosen_tiles <= 2 else 1) if buffers is None else buffers
    return SparseConfig(
        geometry,
        batch,
        push,
        chosen_tiles,
        default_bulk if bulk is None else bulk,
        chosen_buffers,
        trigger,
        pdl,
        exchange,
    )
