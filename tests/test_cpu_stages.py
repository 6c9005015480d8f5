"""The CPU stages over loopback: right values at every key count, and exactly which bits depend on what.

"Same" below is bitwise unless a tolerance is derived next to it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_group import BF16_STEP, ROUTES, Group, Inputs, Result, bits, make_inputs, verify

from dcp_decode import numerics
from dcp_decode.errors import WrongResult
from dcp_decode.geometry import Geometry

COUNTS = [0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 2048]
NAN_BITS = 0x7FFF


def make_geometry(heads: int = 16, dcp: int = 4, topk: int = 40, **more: int) -> Geometry:
    return Geometry(heads=heads, dcp=dcp, topk=topk, capacity=more.pop("capacity", 6), padded_heads=heads + 16, **more)


def some_counts(dcp: int) -> list[list[int]]:
    """Four rows: a few keys everywhere, none anywhere, all on one rank, ragged with empty sources."""
    return [[3 + rank, 0, 40 if rank == dcp - 1 else 0, (5 * rank) % 7] for rank in range(dcp)]


def run_both(geometry: Geometry, inputs: Inputs) -> tuple[Result, Result]:
    """Each route on mailboxes of its own, as in a real run."""
    return Group(geometry).run(inputs, "push"), Group(geometry).run(inputs, "local")


@pytest.mark.parametrize(
    ("dcp", "heads"),
    [(1, 16), (2, 16), (4, 16), (8, 16), (4, 48), (8, 96), (16, 48)],  # 48 / 4 and 96 / 8: a tile spans two owners
)
def test_routes_agree_and_verify(dcp: int, heads: int) -> None:
    geometry = make_geometry(heads, dcp)
    inputs = make_inputs(geometry, some_counts(dcp), seed=dcp + heads)
    push, local = run_both(geometry, inputs)
    verify(inputs, push.merged, geometry)
    verify(inputs, local.merged, geometry)
    assert torch.equal(push.payload, local.payload)
    assert_merged_close(push, local)
    empty = push.lse_log2 == numerics.EMPTY_LSE
    expected_empty = torch.tensor(some_counts(dcp)) == 0  # (D, B)
    assert torch.equal(empty, expected_empty[None, :, :, None].expand_as(empty))
    assert bool((push.payload[empty] == numerics.ARMED_WORD).all())  # an empty row pushes no payload
    assert bool((push.payload[~empty] != numerics.ARMED_WORD).all())
    assert not bits(push.merged[1]).any()  # no key anywhere: zeros, +0.0


def assert_merged_close(push: Result, local: Result) -> None:
    """Within one BF16 unit, plus what the LSE's way through ln can move where the sources cancel.

    The LSE of the local route is rounded by ln 2, the product with it, log2 e and the product with that, 2**-24 each;
    a weight 2**lse is thus off by a factor of at most 1 + 4 * 2**-24 * |lse| * ln 2, and by 2**-22 more through exp2
    at another argument. The merged row is a weighted mean, so it moves by at most twice that of the mean magnitude.
    """
    finite = push.lse_log2.masked_fill(push.lse_log2 == numerics.EMPTY_LSE, 0.0)
    factor = 2 * (4 * 2.0**-24 * float(finite.abs().max()) + 2.0**-22)
    weights = torch.exp2(push.lse_log2.double()).unsqueeze(-1)  # (owner, D, B, H, 1)
    parts = push.payload.view(torch.bfloat16).double().nan_to_num()
    magnitude = (weights * parts.abs()).sum(1) / weights.sum(1).clamp_min(2.0**-126)  # (owner, B, H, 512)
    magnitude = magnitude.permute(1, 0, 2, 3).flatten(1, 2)
    first, second = push.merged.double(), local.merged.double()
    unit = BF16_STEP * torch.exp2(first.abs().clamp_min(2.0**-126).log2().floor())
    assert bool(((first - second).abs() <= unit + factor * magnitude).all())


def test_natural_log_of_a_partial_is_what_the_local_route_leaves() -> None:
    geometry = make_geometry()
    inputs = make_inputs(geometry, some_counts(4))
    lse = Group(geometry).run(inputs, "push").lse_log2[:, 2].permute(1, 0, 2).flatten(1)  # source 2: (B, heads)
    group = Group(geometry)
    group.push_queries(inputs.query)
    partial = group.ranks[2].sparse_decode_local(inputs.caches[2], inputs.rows[2], inputs.valid[2])
    assert tuple(partial.latent.shape) == (4, 32, 512)
    assert not bits(partial.latent[:, 16:]).any()  # the padding is zero with an LSE of -inf, as an empty row
    assert bool((partial.lse_ln[:, 16:] == -torch.inf).all())
    ratio = lse[[0, 3]].double() / partial.lse_ln[[0, 3], :16].double()
    assert bool(((ratio / numerics.LOG2_E - 1).abs() < 2.0**-22).all())  # two roundings of 2**-24
    assert not bits(partial.latent[1]).any()
    assert bool((partial.lse_ln[1] == -torch.inf).all())


@pytest.mark.parametrize("route", ROUTES)
def test_every_count_around_a_chunk_verifies(route: str) -> None:
    geometry = make_geometry(16, 2, topk=2048, capacity=len(COUNTS))
    inputs = make_inputs(geometry, [COUNTS, COUNTS[::-1]], seed=5)
    verify(inputs, Group(geometry).run(inputs, route).merged, geometry)


def test_other_rows_of_the_batch_change_no_bit() -> None:
    geometry = make_geometry(16, 2, topk=2048, capacity=len(COUNTS))
    inputs = make_inputs(geometry, [COUNTS, COUNTS[::-1]], seed=6)
    whole = bits(Group(geometry).run(inputs).merged)
    order = torch.randperm(len(COUNTS), generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(bits(Group(geometry).run(inputs.take(order)).merged), whole[order])
    for subset in ([3], [5, 4], [1, 2, 3, 6, 7], [11]):
        assert torch.equal(bits(Group(geometry).run(inputs.take(subset)).merged), whole[subset])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("negative", [False, True])
def test_nan_query_poisons_its_row_and_head(route: str, negative: bool) -> None:
    geometry = make_geometry()
    inputs = make_inputs(geometry, some_counts(4))
    clean = bits(Group(geometry).run(inputs, route).merged)
    query = inputs.query.clone()
    pattern = torch.tensor([-1 if negative else 0x7FC0], dtype=torch.int16).view(torch.bfloat16)
    query[0, 5, 575] = pattern[0]
    query[2, 15, 0:4] = pattern[0]  # a whole word: 0xFF bytes would be an armed one
    query[1, 3, 9] = pattern[0]  # a row without keys stays zero
    group = Group(geometry)
    merged = bits(group.run(replace(inputs, query=query), route).merged)
    for row, head in ((0, 5), (2, 15)):
        assert bool((merged[row, head] == NAN_BITS).all())
        merged[row, head] = clean[row, head]
    assert torch.equal(merged, clean)
    assert group.armed_as_new()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("encoded", [0x7F, 0xFF])
@pytest.mark.parametrize("column", [0, 511, 575])
def test_nan_key_poisons_the_rows_that_select_it(route: str, encoded: int, column: int) -> None:
    geometry = make_geometry()
    inputs = make_inputs(geometry, some_counts(4))
    clean = bits(Group(geometry).run(inputs, route).merged)
    cache = inputs.caches[3].clone()
    cache[inputs.rows[3][2, 33].long(), column] = encoded
    poisoned = replace(inputs, caches=(*inputs.caches[:3], cache))
    group = Group(geometry)
    merged = bits(group.run(poisoned, route).merged)
    assert bool((merged[2] == NAN_BITS).all())
    assert torch.equal(merged[[0, 1, 3]], clean[[0, 1, 3]])
    assert group.armed_as_new()


def test_indices_past_the_count_are_not_read() -> None:
    """The tail may hold anything, NaN rows of the cache included: only the prefix counts."""
    geometry = make_geometry()
    inputs = make_inputs(geometry, some_counts(4))
    stray = []
    for cache, rows in zip(inputs.caches, inputs.rows, strict=True):
        unselected = int((cache == numerics.E4M3_NAN).all(1).nonzero()[0])
        stray.append(torch.where(rows < 0, unselected, rows))
    expected = bits(Group(geometry).run(inputs).merged)
    assert torch.equal(bits(Group(geometry).run(replace(inputs, rows=tuple(stray))).merged), expected)


@pytest.mark.parametrize("route", ROUTES)
def test_payload_of_an_empty_source_is_never_read(route: str) -> None:
    """NaN and infinity left in the slots of empty sources change no bit, and stay where they are."""
    geometry = make_geometry()
    inputs = make_inputs(geometry, some_counts(4))
    expected = bits(Group(geometry).run(inputs, route).merged)
    group = Group(geometry)
    garbage = torch.tensor([0x7FC0, 0x7F80], dtype=torch.int16).view(torch.int32)
    empty = torch.tensor(some_counts(4)) == 0
    slots = [group.layout.payload.words(mailbox.memory.local)[0, :, :4] for mailbox in group.mailboxes]
    for slot in slots:
        slot[empty] = garbage
    assert torch.equal(bits(group.run(inputs, route).merged), expected)
    assert all(bool((slot[empty] == garbage).all()) for slot in slots)
    assert all(bool((slot[~empty] == numerics.ARMED_WORD).all()) for slot in slots)


@pytest.mark.parametrize("route", ROUTES)
def test_generations_and_the_number_of_uses_change_no_bit(route: str) -> None:
    """Five uses in a row of different batches: each has the bits of a first use, with 2 and with 3 generations."""
    counts = some_counts(4)
    uses = [make_inputs(make_geometry(), [row[: 1 + use % 4] for row in counts], seed=use) for use in range(5)]
    expected = [bits(Group(make_geometry()).run(inputs, route).merged) for inputs in uses]
    for generations in (2, 3):
        group = Group(make_geometry(generations=generations))
        for inputs, merged in zip(uses, expected, strict=True):
            assert torch.equal(bits(group.run(inputs, route).merged), merged)
            assert group.armed_as_new()


def test_swapped_rows_or_lost_keys_fail_the_oracle() -> None:
    """Negative control of `verify`: other inputs than those that ran are told apart."""
    geometry = make_geometry()
    inputs = make_inputs(geometry, some_counts(4))
    merged = Group(geometry).run(inputs).merged
    verify(inputs, merged, geometry)
    with pytest.raises(WrongResult, match="row 0"):
        verify(inputs.take([3, 1, 2, 0]), merged, geometry)
    fewer = (inputs.valid[0] - torch.tensor([1, 0, 0, 0], dtype=torch.int32), *inputs.valid[1:])
    with pytest.raises(WrongResult, match="row 0"):
        verify(replace(inputs, valid=fewer), merged, geometry)
