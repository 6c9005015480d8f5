"""Position maps, pages and the flat FP8 cache: inverse of each other, exact at any position, agreed without talking."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_decode import cache, numerics
from dcp_decode.cache import FlatCache, PagePool
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.geometry import DCP_SIZES, MAX_CONTEXT, PAGE_TOKENS, Geometry

LAST_POSITION = 2**31 - 1
INTERLEAVES = (1, 3, 64)


def make_geometry(dcp: int = 8, interleave: int = 1, page_stride_rows: int = PAGE_TOKENS, **more: float) -> Geometry:
    return Geometry(
        heads=96, dcp=dcp, interleave=interleave, page_stride_rows=page_stride_rows, capacity=2, topk=8, **more
    )


# Around multiples of FP32's 2**24 and at the end of what a row may number: positions that a float would merge.
POSITIONS = torch.cat(
    [
        torch.arange(0, 2000),
        torch.arange(2**24 - 500, 2**24 + 500),
        torch.arange(2**30 + 2**24 - 500, 2**30 + 2**24 + 500),
        torch.arange(LAST_POSITION - 999, LAST_POSITION + 1),
    ]
)


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("dcp", DCP_SIZES)
def test_maps_are_inverse_of_each_other(dcp: int, interleave: int) -> None:
    geometry = make_geometry(dcp, interleave)
    owners, locals_ = cache.owner(POSITIONS, geometry), cache.local(POSITIONS, geometry)
    assert owners.dtype == locals_.dtype == torch.int64
    assert int(owners.min()) >= 0
    assert int(owners.max()) < dcp
    for rank in range(dcp):
        own = owners == rank
        assert torch.equal(cache.position(locals_[own], rank, geometry), POSITIONS[own])
        # A rank's positions keep their order, so that local order is ascending position order.
        assert bool((locals_[own].diff() > 0).all())
    for place in (0, 1234, 2500, len(POSITIONS) - 1):  # ints take the same way as tensors
        position = int(POSITIONS[place])
        assert (cache.owner(position, geometry), cache.local(position, geometry)) == (
            int(owners[place]),
            int(locals_[place]),
        )
        assert cache.position(int(locals_[place]), int(owners[place]), geometry) == position


@given(
    position=st.integers(0, LAST_POSITION),
    dcp=st.sampled_from(DCP_SIZES),
    interleave=st.integers(1, 300) | st.just(MAX_CONTEXT),
)
@settings(max_examples=300, deadline=None)
def test_every_position_has_one_place(position: int, dcp: int, interleave: int) -> None:
    geometry = make_geometry(dcp, interleave)
    rank, place = cache.owner(position, geometry), cache.local(position, geometry)
    assert cache.position(place, rank, geometry) == position
    # The rank stores exactly `place` positions before this one.
    assert cache.local_count(position, rank, geometry) == place
    assert cache.local_count(position + 1, rank, geometry) == place + 1


def test_a_map_through_fp32_would_merge_positions() -> None:
    """The negative control: the values used above can tell a float from an integer."""
    rounded = POSITIONS.to(torch.float32).to(torch.int64)
    assert int((rounded != POSITIONS).sum()) > 1000
    geometry = make_geometry()
    assert not torch.equal(cache.local(rounded, geometry), cache.local(POSITIONS, geometry))


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("dcp", DCP_SIZES)
def test_local_count_is_a_count(dcp: int, interleave: int) -> None:
    geometry = make_geometry(dcp, interleave)
    longest = 2 * dcp * interleave + 7
    owners = cache.owner(torch.arange(longest), geometry)
    for context in range(longest + 1):
        counts = [cache.local_count(context, rank, geometry) for rank in range(dcp)]
        assert counts == [int((owners[:context] == rank).sum()) for rank in range(dcp)]
        assert max(counts) == counts[0]  # what pages_needed relies on


@pytest.mark.parametrize(
    ("tokens", "interleave", "pages"),
    [
        (0, 1, 0),
        (1, 1, 1),
        (8 * 64, 1, 1),
        (8 * 64 + 1, 1, 2),
        (64, 64, 1),  # all of them on rank 0
        (8 * 64, 64, 1),
        (8 * 64 + 1, 64, 2),
        (65, 1000, 2),
        (MAX_CONTEXT, 1, 2048),
    ],
)
def test_pages_needed(tokens: int, interleave: int, pages: int) -> None:
    geometry = make_geometry(8, interleave)
    assert cache.pages_needed(tokens, geometry) == pages
    # Every rank's rows of the request fit its pages.
    assert all(cache.local_count(tokens, rank, geometry) <= pages * PAGE_TOKENS for rank in range(8))


@pytest.mark.parametrize("stride", [64, 65, 192])
def test_flat_rows_follow_the_page_table(stride: int) -> None:
    geometry = make_geometry(page_stride_rows=stride)
    table = torch.tensor([5, 0, 3])
    flat = cache.flat_rows(table, torch.arange(3 * PAGE_TOKENS), geometry)
    expected = [page * stride + offset for page in (5, 0, 3) for offset in range(PAGE_TOKENS)]
    assert flat.tolist() == expected


def test_flat_rows_are_exact_for_large_caches() -> None:
    geometry = make_geometry(page_stride_rows=1 << 20)
    flat = cache.flat_rows(torch.tensor([2046, 2047]), torch.tensor([1, 127]), geometry)
    assert flat.tolist() == [2046 * 2**20 + 1, 2047 * 2**20 + 63]


def test_page_pool_is_last_in_first_out_and_replicated() -> None:
    pool, replica = PagePool(6), PagePool(6)
    for one in (pool, replica):
        first, second = one.allocate(2), one.allocate(3)
        assert (first, second, one.free, one.capacity) == ((0, 1), (2, 3, 4), 1, 6)
        one.release(first)
        assert one.allocate(2) == (1, 0)  # the pages given back last come first
    assert pool.allocate(1) == replica.allocate(1) == (5,)


def test_exhausted_pool_gives_nothing_and_stays_as_it_is() -> None:
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.free == 3
    taken = pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.free == 1
    assert pool.allocate(0) == ()
    pool.release(taken)
    everything = pool.allocate(3)
    assert sorted(everything) == [0, 1, 2]
    assert pool.allocate(1) is None


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param((1,), id="free already"),
        pytest.param((0, 0), id="twice in one release"),
        pytest.param((7,), id="no page of this pool"),
        pytest.param((-1,), id="negative"),
    ],
)
def test_wrong_release_is_refused_and_changes_nothing(pages: tuple[int, ...]) -> None:
    pool = PagePool(3)
    assert pool.allocate(1) == (0,)
    with pytest.raises(ValueError, match="page"):
        pool.release(pages)
    assert pool.free == 2
    pool.release((0,))
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_unwritten_rows_are_nan() -> None:
    flat = FlatCache(2, 3, make_geometry(page_stride_rows=70))
    assert [tuple(rows.shape) for rows in flat.rows] == [(210, 576)] * 2
    flat.write(1, torch.tensor([4]), torch.zeros(1, 576, dtype=torch.uint8))
    assert bool((flat.rows[0] == numerics.E4M3_NAN).all())
    assert int((flat.rows[1] == numerics.E4M3_NAN).sum()) == 209 * 576


def test_a_cache_that_does_not_fit_the_memory_is_refused() -> None:
    with pytest.raises(UnsupportedEnvironment, match=r"cache of 1179648\.0 GiB \(cache.pages x 2 layers\)"):
        FlatCache(2, 1 << 20, make_geometry(page_stride_rows=1 << 20))  # more than a process can address


@pytest.mark.parametrize("k_scale", [1 / 16, 0.03])
def test_append_quantizes_with_the_scale_of_the_keys(k_scale: float) -> None:
    geometry = make_geometry(k_scale=k_scale, q_scale=1.0)
    flat = FlatCache(1, 1, geometry)
    values = torch.randn(5, 576, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    values[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    rows = torch.tensor([63, 0, 9, 10, 2])
    flat.append(0, rows, values)
    expected = numerics.quantize_e4m3(values, k_scale)
    assert torch.equal(flat.rows[0][rows], expected)
    assert expected[0, :3].tolist() == [0x7E, 0xFE, 0x7F]  # saturated, saturated, canonical NaN
    assert not torch.equal(expected, numerics.quantize_e4m3(values, 1.0))  # the other scale would show
    # The value is within half an E4M3 step (2**-4 relative, or half the smallest subnormal) of what was stored.
    restored = numerics.e4m3_values(expected[1:], torch.float64) * k_scale
    error = (restored - values[1:].double()).abs()
    bound = values[1:].double().abs() * 2.0**-4 + k_scale * 2.0**-10
    assert bool((error <= bound * (1 + 2.0**-20)).all())  # the reciprocal of the scale is rounded to FP32


def test_interleaved_ranks_store_a_context_once() -> None:
    """Write a coded row at every position through the maps; each must be found again, on its owner only."""
    for interleave in INTERLEAVES:
        geometry = make_geometry(4, interleave)
        tokens = 4 * 64 * 2 + 5
        pages = torch.tensor([3, 1, 0])[: cache.pages_needed(tokens, geometry)]
        written = []
        for rank in range(4):
            count = cache.local_count(tokens, rank, geometry)
            positions = cache.position(torch.arange(count), rank, geometry)
            flat = cache.flat_rows(pages, torch.arange(count), geometry)
            assert len(flat.unique()) == count
            assert torch.equal(cache.flat_rows(pages, cache.local(positions, geometry), geometry), flat)
            written += positions.tolist()
        assert sorted(written) == list(range(tokens))
        assert all(after > before for before, after in pairwise(sorted(written)))


def test_another_fault_of_torch_is_not_called_a_lack_of_memory(monkeypatch) -> None:
    def broken(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "full", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        FlatCache(1, 1, Geometry())
