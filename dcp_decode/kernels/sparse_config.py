"""Static choices of the sparse decode kernel, its shared-memory picture, and typed reasons for refusing a geometry.

Shared memory of a CTA (bytes, tiles = 1 / 2 / 3, one key buffer; offsets are multiples of 128):

    barriers     64 B            inbox mbarrier, one mbarrier a key buffer, abort flag of the query words
    statistics   4 x 16t x 8     (max, sum) of every CTA and head, FP32
    rescale      16t x 4         FP32 a head
    P            16t x 96        E4M3, 64 keys a head
    query        16t x 592       E4M3, 576 bytes a head                          ] after the last chunk these hold the
    keys         s x 64 x 592    E4M3, s buffers                                 ] CTA's own partials, and the staged
    scores       4 x 16t x 320   FP32 partial scores of the four depths          ] ones of the bulk exchange
    inbox        3 x 16t x 576   FP32 partials of the three peers

    total        97,792 / 157,440 / 217,216 with one key buffer; 135,680 / 195,328 / refused with two

* A row pitch of 592 = 37 x 16 bytes makes ldmatrix conflict-free and stays aligned for 16-byte bulk copies.
* The pitches 320 (scores), 96 (P) and 576 (inbox) are 16, 24 and 16 words modulo the 32 banks: the vector accesses of
  a quarter or half warp, which span 2 or 4 rows, meet no conflict.
* The inbox holds only the peers' partials: the CTA's own stay in the overlay, as do those staged for bulk copies.
  That is what lets three tiles fit; four would need 264 KB of the 227 KB.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dcp_decode import numerics
from dcp_decode.errors import DcpDecodeError
from dcp_decode.geometry import HEAD_TILE, MAX_TOPK, Geometry
from dcp_decode.mailbox import MailboxLayout

FAMILY = "seed"
SPLIT = 4  # CTAs of a cluster: key j of a row goes to CTA j % SPLIT
CHUNK = 64  # keys of a CTA between two updates of the running maximum
WARPS = 16  # warps that gather, compute and merge
QUERY_WARPS = 4  # of a one-tile CTA: a warp group that waits for the query words, fences and re-arms beside the others
DEPTHS = 4  # parts of the 576 bytes whose partial scores different warps hold
COLUMNS = numerics.LATENT_DIM // SPLIT  # latent columns that one CTA of the cluster merges

ROW_PITCH = numerics.ROW_BYTES + 16
SCORE_PITCH = (CHUNK + 16) * 4
PROBABILITY_PITCH = CHUNK + 32
INBOX_PITCH = COLUMNS * 4 + 64

MAX_SHARED_BYTES = 227 * 1024  # of one CTA on sm_90a, sm_100a and sm_103a
MAX_TILES = 3
TRIGGERS = ("start", "merge", "end")
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
    ARCHITECTURE = f"the architecture must be one of {', '.join(ARCHITECTURES)}"


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
    architecture: str = "sm_90a"

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
        return SharedLayout(self.tiles, self.buffers)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.shared.nbytes

    @property
    def query_warps(self) -> int:
        """Warps beside the 16 that serve the query only; 640 threads have 96 registers each, too few for wide CTAs."""
        return QUERY_WARPS if self.tiles == 1 else 0

    @property
    def threads(self) -> int:
        return 32 * (WARPS + self.query_warps)

    @property
    def query_threads(self) -> int:
        """Threads that poll: the query warps, or all of a wide CTA."""
        return 32 * (self.query_warps or WARPS)

    @property
    def name(self) -> str:
        """Of the variant, for tables and file names."""
        parts = [f"b{self.batch}", f"h{self.geometry.heads}", "push" if self.push else "local", f"t{self.tiles}"]
        parts += ["bulk"] * self.bulk + ["single"] * (self.buffers == 1) + [self.trigger] * (self.trigger != "merge")
        return "sparse_" + "_".join(parts)


@dataclass(frozen=True)
class SharedLayout:
    """Byte offsets of the picture above, from the start of dynamic shared memory."""

    tiles: int
    buffers: int

    @property
    def head_rows(self) -> int:
        return HEAD_TILE * self.tiles

    # Barriers: the inbox's, then one a key buffer; the abort flag of the CTA's query words follows them.
    inbox_barrier = 0
    abort_flag = 56

    @staticmethod
    def key_barrier(buffer: int) -> int:
        return 8 * (1 + buffer)

    @property
    def statistics(self) -> int:  # (SPLIT, head_rows) of (max, sum), FP32
        return 64

    @property
    def rescale(self) -> int:  # (head_rows) FP32
        return _aligned(self.statistics + SPLIT * self.head_rows * 8)

    @property
    def probabilities(self) -> int:  # (head_rows, CHUNK) E4M3, rows of PROBABILITY_PITCH bytes
        return _aligned(self.rescale + self.head_rows * 4)

    @property
    def query(self) -> int:  # (head_rows, 576) E4M3, rows of ROW_PITCH bytes
        return _aligned(self.probabilities + self.head_rows * PROBABILITY_PITCH)

    @property
    def keys(self) -> int:  # (buffers, CHUNK, 576) E4M3, rows of ROW_PITCH bytes
        return _aligned(self.query + self.head_rows * ROW_PITCH)

    @property
    def scores(self) -> int:  # (DEPTHS, head_rows, CHUNK) FP32, rows of SCORE_PITCH bytes
        return _aligned(self.keys + self.buffers * CHUNK * ROW_PITCH)

    @property
    def inbox(self) -> int:  # (SPLIT - 1, head_rows, COLUMNS) FP32, rows of INBOX_PITCH bytes
        return _aligned(self.scores + DEPTHS * self.head_rows * SCORE_PITCH)

    @property
    def partial_bytes(self) -> int:
        """Bytes of one CTA's partials of one peer's columns, pads included."""
        return self.head_rows * INBOX_PITCH

    @property
    def own_partial(self) -> int:  # (head_rows, COLUMNS) FP32: over keys and scores, dead after the last chunk
        # Three tiles need the query's room too. With one tile a CTA without keys may still be reading its query.
        return self.keys if self.keys + SPLIT * self.partial_bytes <= self.inbox else self.query

    def staged(self, block: int) -> int:
        """Partials staged for bulk copy `block` (0 .. SPLIT - 2), after the CTA's own."""
        return self.own_partial + (1 + block) * self.partial_bytes

    @property
    def nbytes(self) -> int:
        return self.inbox + (SPLIT - 1) * self.partial_bytes

    @property
    def overlay_fits(self) -> bool:
        return self.staged(SPLIT - 1) <= self.inbox


def _aligned(offset: int) -> int:
    return (offset + 127) // 128 * 128


def can_implement(config: SparseConfig) -> SparseRefusal | None:
    """None when the kernel can run this configuration, else why not."""
    g = config.geometry
    if config.architecture not in ARCHITECTURES:
        return SparseRefusal(RefusalReason.ARCHITECTURE, config.architecture)
    if config.buffers not in (1, 2):
        return SparseRefusal(RefusalReason.BUFFERS, f"key buffers {config.buffers}")
    if config.trigger not in TRIGGERS:
        return SparseRefusal(RefusalReason.TRIGGER, config.trigger)
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
    architecture: str = "sm_90a",
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
        architecture,
    )
