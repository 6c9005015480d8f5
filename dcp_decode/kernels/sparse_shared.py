"""Where the sparse decode kernel keeps what: byte offsets in the dynamic shared memory of a CTA, for both exchanges.

t head tiles, b buffers of a chunk of c blocks (64 keys); offsets are multiples of 128. Exchange of partials, c = 1:

    barriers     128 B              mbarriers, abort flag and use number of the query words
    statistics   4 x 16t x 8        (max, sum) of every CTA and head, FP32
    rescale      16t x 4            FP32 a head
    P            16t x 96           E4M3, 64 keys a head
    query        16t x 592          E4M3, 576 bytes a head                         ] after the last chunk these hold the
    keys         b x 64 x 592       E4M3                                           ] CTA's own partials, and the staged
    scores       4 x 16t x 320      FP32 partial scores of the four depths         ] ones of the bulk exchange
    inbox        3 x 16t x 576      FP32 partials of the three peers

    total        97,792 / 157,440 / 217,216 for 1 / 2 / 3 tiles and one key buffer; 135,680 / 195,328 / refused for two

Exchange of probabilities:

    barriers, statistics            as above
    maxima       2 x 16t x 4 x 4             FP32 running max of every CTA, two rounds
    P            2 x c x 4 x 16t x 64        E4M3 of every CTA, two rounds
    outgoing     c x 16t x 64                E4M3, this CTA's P on its way
    query        16t x 592
    values       b x c x 4 x 64 x 144        this CTA's 128 columns of every CTA's keys
    keys         b x c x 64 x 592                                      ] after the last round the CTA's columns of
    scores       s x 4 x 16t x (256 c + 64)  two slabs where they fit  ] all heads, FP32
    kept         32 KiB                      registers of 3 tiles between the rounds
    scratch      1 KiB                       of one tile: see `memory.wait_barrier`

    total        136,576 / 211,328 for 1 tile and 1 / 2 buffers; 216,448 for 1 tile and a chunk of two blocks

* A row pitch of 592 = 37 x 16 bytes makes ldmatrix conflict-free and stays aligned for 16-byte bulk copies; a values
  row is an odd number of 16-byte pieces too.
* The pitches 320 or 576 (scores), 96 (P) and 576 (inbox) are 16, 24 and 16 words modulo the 32 banks: vector accesses
  of a quarter or half warp, which span 2 or 4 rows, meet no conflict. P of 64 bytes a head is swizzled instead.
* The inbox holds only the peers' partials: the CTA's own stay in the overlay, as do those staged for bulk copies.
  That is what lets three tiles fit; four would need 270 KB of the 227 KB.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_decode import numerics
from dcp_decode.geometry import HEAD_TILE

BLOCK = 64  # keys of a CTA in one buffer; a chunk, between two updates of the running maximum, has one or two
DEPTHS = 4  # parts of the 576 bytes whose partial scores different warps hold
ROW_PITCH = numerics.ROW_BYTES + 16
MAX_SHARED_BYTES = 227 * 1024  # of one CTA on sm_90a, sm_100a and sm_103a
BARRIERS_BYTES = 128
SPLIT = 4  # CTAs of a cluster: key j of a row goes to CTA j % SPLIT
COLUMNS = numerics.LATENT_DIM // SPLIT  # latent columns that one CTA of the cluster merges


def aligned(offset: int) -> int:
    return (offset + 127) // 128 * 128


@dataclass(frozen=True)
class SharedLayout:
    """What both exchanges have; offsets in bytes from the start of dynamic shared memory."""

    tiles: int
    buffers: int
    blocks: int = 1  # of a chunk

    # An mbarrier of the inbox or the statistics, one a key buffer, those of the layouts; then words of the query warps.
    inbox_barrier = 0
    abort_flag = 112
    use_number = 116

    @property
    def head_rows(self) -> int:
        return HEAD_TILE * self.tiles

    @property
    def slots(self) -> int:
        """Key buffers of a block: 1 or 2, since more do not fit."""
        return self.buffers * self.blocks

    @staticmethod
    def key_barrier(slot: int) -> int:
        return 8 * (1 + slot)

    @property
    def statistics(self) -> int:  # (SPLIT, head_rows) of (max, sum), FP32
        return BARRIERS_BYTES

    @property
    def after_statistics(self) -> int:
        return aligned(self.statistics + SPLIT * self.head_rows * 8)

    @property
    def query(self) -> int:  # (head_rows, 576) E4M3, rows of ROW_PITCH bytes
        raise NotImplementedError

    @property
    def keys(self) -> int:  # (slots, BLOCK, 576) E4M3, rows of ROW_PITCH bytes
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def overlay_fits(self) -> bool:
        raise NotImplementedError

    @property
    def slab_bytes(self) -> int:
        """Bytes of the (DEPTHS, head_rows, blocks, BLOCK) FP32 partial scores, rows of `score_pitch` bytes."""
        return DEPTHS * self.head_rows * self.score_pitch

    @property
    def score_pitch(self) -> int:
        return (self.blocks * BLOCK + 16) * 4


@dataclass(frozen=True)
class PartialsLayout(SharedLayout):
    """Exchange of FP32 partials."""

    probability_pitch = BLOCK + 32
    partial_pitch = COLUMNS * 4 + 64

    @property
    def partial_bytes(self) -> int:
        """Bytes of one CTA's partials of one peer's columns, pads included."""
        return self.head_rows * self.partial_pitch

    @property
    def rescale(self) -> int:  # (head_rows) FP32
        return self.after_statistics

    @property
    def probabilities(self) -> int:  # (head_rows, BLOCK) E4M3
        return aligned(self.rescale + self.head_rows * 4)

    @property
    def query(self) -> int:  # (head_rows, 576) E4M3, rows of ROW_PITCH bytes
        return aligned(self.probabilities + self.head_rows * self.probability_pitch)

    @property
    def keys(self) -> int:  # (slots, BLOCK, 576) E4M3, rows of ROW_PITCH bytes
        return aligned(self.query + self.head_rows * ROW_PITCH)

    @property
    def scores(self) -> int:
        return aligned(self.keys + self.slots * BLOCK * ROW_PITCH)

    @property
    def inbox(self) -> int:  # (SPLIT - 1, head_rows, COLUMNS) FP32, rows of `partial_pitch` bytes
        return aligned(self.scores + self.slab_bytes)

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


@dataclass(frozen=True)
class ProbabilitiesLayout(SharedLayout):
    """Exchange of E4M3 probabilities."""

    value_pitch = COLUMNS + 16
    output_pitch = COLUMNS * 4 + 64
    value_bytes = SPLIT * BLOCK * value_pitch  # of one block

    @staticmethod
    def value_barrier(slot: int) -> int:
        return 8 * (3 + slot)

    @staticmethod
    def probability_barrier(parity: int) -> int:
        return 8 * (5 + parity)

    @staticmethod
    def keys_free_barrier(slot: int) -> int:
        return 8 * (7 + slot)

    @staticmethod
    def values_free_barrier(slot: int) -> int:
        return 8 * (9 + slot)

    @property
    def maxima(self) -> int:  # (2, head_rows, SPLIT) FP32
        return self.after_statistics

    @property
    def maxima_bytes(self) -> int:
        """Of one round."""
        return self.head_rows * SPLIT * 4

    @property
    def probabilities(self) -> int:  # (2, blocks, SPLIT, head_rows, BLOCK) E4M3, swizzled
        return aligned(self.maxima + 2 * self.maxima_bytes)

    @property
    def probability_bytes(self) -> int:
        """Of one block of all CTAs."""
        return SPLIT * self.outgoing_bytes

    @property
    def outgoing(self) -> int:  # (blocks, head_rows, BLOCK) E4M3
        return self.probabilities + 2 * self.blocks * self.probability_bytes

    @property
    def outgoing_bytes(self) -> int:
        """Of one block."""
        return self.head_rows * BLOCK

    @property
    def query(self) -> int:  # (head_rows, 576) E4M3, rows of ROW_PITCH bytes
        return aligned(self.outgoing + self.blocks * self.outgoing_bytes)

    @property
    def values(self) -> int:  # (slots, SPLIT, BLOCK, COLUMNS) E4M3, rows of `value_pitch` bytes
        return aligned(self.query + self.head_rows * ROW_PITCH)

    @property
    def keys(self) -> int:  # (slots, BLOCK, 576) E4M3, rows of ROW_PITCH bytes
        return aligned(self.values + self.slots * self.value_bytes)

    @property
    def scores(self) -> int:  # (slabs, DEPTHS, head_rows, blocks, BLOCK) FP32
        return aligned(self.keys + self.slots * BLOCK * ROW_PITCH)

    @property
    def slabs(self) -> int:
        """Two where they fit and save the second barrier of a round."""
        return 2 if self.scores + 2 * self.slab_bytes <= MAX_SHARED_BYTES else 1

    @property
    def kept(self) -> int:  # (COMPUTE_WARPS, slots, 32 lanes, 4) FP32: what three tiles keep between rounds
        return aligned(self.scores + self.slabs * self.slab_bytes)

    @property
    def kept_slots(self) -> int:
        """Of four FP32 a lane: 8 sums and 2 running sums a tile."""
        return -(-10 * self.tiles // 4) if self.tiles > 2 else 0

    @property
    def scratch(self) -> int:  # (compute threads) words that `memory.wait_barrier` writes and nobody reads
        return self.kept + 8 * self.kept_slots * 512

    @property
    def outputs(self) -> int:  # (head_rows, COLUMNS) FP32, rows of `output_pitch` bytes, over the keys
        return self.keys

    @property
    def nbytes(self) -> int:
        return self.scratch + (1024 if self.tiles == 1 else 0)

    @property
    def overlay_fits(self) -> bool:
        return self.outputs + self.head_rows * self.output_pitch <= self.nbytes
