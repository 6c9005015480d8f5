"""Where the warpgroup decode keeps what: byte offsets in the dynamic shared memory of a CTA.

n heads of a CTA (N of its wgmma), S CTAs a cluster, chunks of c keys in c / 64 tiles (M of its scores):

    barriers        128 B             mbarriers, abort flag and use number of the query words
    own statistics  n x 8             (max, sum) of this CTA and a head, FP32
    maxima          2 x n x 4         of a chunk's scores, in turns, as ordered integers
    owners          16 x 8            base addresses of the peers
    query           9 x n x 128       f16: blocks of 64 of the 576 numbers        ] 128-byte swizzle, 1024-byte aligned
    probabilities   c / 64 x n x 128  f16: blocks of 64 keys                      ]
    keys            c x 592           E4M3, the bytes as they lie in the cache
    scores          (4 / tiles - 1) x c x n x 4, FP32 partial scores where several warpgroups share a tile
    inbox           n x 2048          S > 1: FP32 sums of the CTA's columns from every CTA of the cluster
    statistics      S x n x 8         S > 1: (max, sum) of every CTA and head

* outputs, BF16 rows on their way to global memory, lie over the query: all of it has been read before the last values.
* Where inbox and statistics don't fit beside the rest they lie over probabilities, keys and scores: peers must then ask
  before they send (`inbox_overlays`).
* 48 heads and 256 keys fill the 227 KB to the last byte.
* The 16 bytes that pad a key row to 592 hold sums of P of the warp that scores it.
* A row pitch of 592 bytes (37 x 16) makes ldmatrix conflict-free; outputs rows are an odd number of 16-byte pieces too.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_decode import numerics
from dcp_decode.geometry import DCP_SIZES
from dcp_decode.kernels.sparse_shared import BARRIERS_BYTES, MAX_SHARED_BYTES, ROW_PITCH

WARPGROUPS = 4  # that compute
KEY_TILE = 64  # keys of one wgmma of the scores
BLOCK = 64  # f16 numbers of a swizzled 128-byte row
QUERY_BLOCKS = numerics.ROW_BYTES // BLOCK
SWIZZLE_BYTES = 1024  # alignment of an operand in shared memory


def aligned(offset: int) -> int:
    return (offset + SWIZZLE_BYTES - 1) // SWIZZLE_BYTES * SWIZZLE_BYTES


@dataclass(frozen=True)
class WarpgroupLayout:
    """Offsets in bytes from the start of dynamic shared memory, which is 1024-byte aligned."""

    head_rows: int
    split: int
    chunk: int

    # mbarriers: the inbox, one a key tile, two that tell that the peers' inboxes and keys may be written; words of the
    # query.
    inbox_barrier = 0
    inboxes_free_barrier = 40
    keys_free_barrier = 48
    abort_flag = 112
    use_number = 116

    @staticmethod
    def key_barrier(tile: int) -> int:
        return 8 * (1 + tile)

    @property
    def tiles(self) -> int:
        """64-key tiles of a chunk."""
        return self.chunk // KEY_TILE

    @property
    def depths(self) -> int:
        """Warpgroups that share a tile: each scores its part of the 576 numbers."""
        return WARPGROUPS // self.tiles

    @property
    def columns(self) -> int:
        """Latent columns that one CTA of the cluster finishes."""
        return numerics.LATENT_DIM // self.split

    @property
    def own_statistics(self) -> int:  # (head_rows) of (max, sum), FP32
        return BARRIERS_BYTES

    @property
    def maxima(self) -> int:  # (2, head_rows) int32
        return self.own_statistics + self.head_rows * 8

    @property
    def owners(self) -> int:  # (D) base addresses of the peers' mailboxes
        return self.maxima + 2 * self.head_rows * 4

    @property
    def query(self) -> int:  # (QUERY_BLOCKS, head_rows, BLOCK) f16, swizzled
        return aligned(self.owners + DCP_SIZES[-1] * 8)

    @property
    def block_bytes(self) -> int:
        """Of one swizzled block of all heads."""
        return self.head_rows * BLOCK * 2

    @property
    def probabilities(self) -> int:  # (tiles, head_rows, BLOCK) f16, swizzled
        return self.query + QUERY_BLOCKS * self.block_bytes

    @property
    def keys(self) -> int:  # (chunk, 576) E4M3, rows of ROW_PITCH bytes
        return self.probabilities + self.tiles * self.block_bytes

    @property
    def scores(self) -> int:  # (depths - 1, chunk, head_rows) FP32
        return self.keys + self.chunk * ROW_PITCH

    @property
    def after_scores(self) -> int:
        return self.scores + (self.depths - 1) * self.chunk * self.head_rows * 4

    @property
    def inbox_bytes(self) -> int:
        """FP32 sums of every CTA, the own ones too."""
        return self.split * self.source_bytes if self.split > 1 else 0

    @property
    def statistics_bytes(self) -> int:
        """Of every CTA, the own ones too."""
        return self.split * self.head_rows * 8 if self.split > 1 else 0

    @property
    def source_bytes(self) -> int:
        """FP32 sums that one CTA of the cluster contributes to another."""
        return self.head_rows * self.columns * 4

    @property
    def inbox_overlays(self) -> bool:
        return self.after_scores + self.inbox_bytes + self.statistics_bytes > MAX_SHARED_BYTES

    @property
    def inbox(self) -> int:  # (split, fragments, 32 lanes, 4) FP32, `WarpgroupOutputs`
        return self.probabilities if self.inbox_overlays else self.after_scores

    @property
    def statistics(self) -> int:  # (split, head_rows) of (max, sum), FP32
        return self.inbox + self.inbox_bytes if self.split > 1 else self.own_statistics

    @property
    def output_pitch(self) -> int:
        return self.columns * 2 + 16

    @property
    def outputs(self) -> int:  # (head_rows, columns) BF16, rows of `output_pitch` bytes
        return self.query

    @property
    def nbytes(self) -> int:
        return max(self.after_scores, self.inbox + self.inbox_bytes + self.statistics_bytes)
