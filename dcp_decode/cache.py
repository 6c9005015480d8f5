"""Flat FP8 KV cache of one rank: which rank stores a position, where, and the pages that hold it.

Positions are dealt to D ranks in runs of I (interleave), and a rank's own positions fill 64-token pages in order:

    position   0 1 2 3 | 4 5 6 7 | 8 ...        D = 4, I = 1
    owner      0 1 2 3 | 0 1 2 3 | 0
    local      0 0 0 0 | 1 1 1 1 | 2            local // 64 -> the request's page, local % 64 -> offset in it

    flat row = page * page_stride_rows + offset     (page_stride_rows > 64 leaves room for other layers' pages)

The maps are integer arithmetic and work on Python ints and int64 tensors alike, so a position is exact at any size.
Every rank takes the same pages for a request (the count of the rank that stores most of it), so one replicated
allocator serves all ranks and page tables never travel.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from dcp_decode import numerics
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.geometry import PAGE_TOKENS, Geometry

CPU_ALLOCATOR = "DefaultCPUAllocator"  # named by torch in a RuntimeError when it has no memory

Index = TypeVar("Index", int, torch.Tensor)


def owner(position: Index, geometry: Geometry) -> Index:
    """Rank that stores a global position."""
    return (position // geometry.interleave) % geometry.dcp


def local(position: Index, geometry: Geometry) -> Index:
    """Index of a global position among the positions that its owner stores."""
    run = geometry.interleave
    return (position // (geometry.dcp * run)) * run + position % run


def position(local_index: Index, rank: int, geometry: Geometry) -> Index:
    """Global position of a rank's local index: the inverse of `owner` and `local`."""
    run = geometry.interleave
    return (local_index // run) * (geometry.dcp * run) + rank * run + local_index % run


def local_count(context: int, rank: int, geometry: Geometry) -> int:
    """How many of the positions 0 .. context - 1 a rank stores."""
    run = geometry.interleave
    turn = geometry.dcp * run
    rest = context % turn - rank * run
    return context // turn * run + min(max(rest, 0), run)


def pages_needed(tokens: int, geometry: Geometry) -> int:
    """Pages that a request of `tokens` positions takes on every rank: rank 0 always stores the most."""
    return -(-local_count(tokens, 0, geometry) // PAGE_TOKENS)


def flat_rows(pages: torch.Tensor, local_indices: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Flat cache rows (int64) of a request's local indices under its page table `pages` (int64 [pages])."""
    return pages[local_indices // PAGE_TOKENS] * geometry.page_stride_rows + local_indices % PAGE_TOKENS


class PagePool:
    """Free pages of the flat cache, replicated on all ranks: the same calls give the same page numbers everywhere.

    Pages given back are reused last-in first-out, so a request's pages are soon scattered as in a live server.
    """

    def __init__(self, pages: int) -> None:
        self.capacity = pages
        self._free = list(range(pages - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` page numbers, or None (and no change) if fewer are free."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def release(self, pages: tuple[int, ...]) -> None:
        """Give pages back. A page that is not taken, or named twice, is refused and nothing changes (ValueError)."""
        returned = set(pages)
        if len(returned) < len(pages) or not returned <= self._taken:
            raise ValueError(f"pages {pages}: {sorted(returned - self._taken)} are not taken, or one is named twice")
        self._taken -= returned
        self._free.extend(pages)


class FlatCache:
    """Flat FP8 rows of one rank, one tensor a layer: rows[layer] is uint8 [pages * page_stride_rows, 576].

    Raises UnsupportedEnvironment if the device has no memory for them.
    """

    def __init__(self, layers: int, pages: int, geometry: Geometry, device: torch.device | str = "cpu") -> None:
        self.geometry = geometry
        shape = (pages * geometry.page_stride_rows, numerics.ROW_BYTES)
        # NaN bytes where nothing was written: a kernel that reads an unselected row shows it.
        try:
            self.rows = [torch.full(shape, numerics.E4M3_NAN, dtype=torch.uint8, device=device) for _ in range(layers)]
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and CPU_ALLOCATOR not in str(error):
                raise
            size = layers * shape[0] * shape[1] / 2**30
            raise UnsupportedEnvironment(
                f"a rank's cache of {size:.1f} GiB (cache.pages x {layers} layers) does not fit the memory of {device}"
            ) from None

    def write(self, layer: int, flat: torch.Tensor, encoded: torch.Tensor) -> None:
        """Store E4M3 rows (uint8 [n, 576]) at flat rows (int64 [n])."""
        self.rows[layer].index_copy_(0, flat, encoded)

    def append(self, layer: int, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize KV rows (BF16 [n, 576]) with the cache's scale and store them at flat rows (int64 [n])."""
        self.write(layer, flat, numerics.quantize_e4m3(values, self.geometry.k_scale))

    def part(self, first_row: int, rows: int) -> FlatCache:
        """The cache of `rows` rows from `first_row` on, in the same memory."""
        one = FlatCache(0, 0, self.geometry)
        one.rows = [whole[first_row : first_row + rows] for whole in self.rows]
        return one
