"""The oracle and its bounds: correct FP32 arithmetic always lies inside, each kind of wrong arithmetic outside."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sparse_reference import Faults, decode, merge, partial, truncating_product

from dcp_decode import numerics, oracle
from dcp_decode.errors import ConfigError, WrongResult
from dcp_decode.geometry import Geometry
from dcp_decode.needle import STRAY_BYTE, build_needle, check_needle, check_needle_lse

KIMI = Geometry()
COUNTS = (0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 2048)
HEADS = 6


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal_bytes(*shape: int, deviation: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return numerics.e4m3_bytes(torch.randn(*shape, generator=generator) * deviation)


def any_bytes(*shape: int, seed: int) -> torch.Tensor:
    encoded = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where((encoded & 0x7F) == 0x7F, 0x7E, encoded)


def signed_byte(*shape: int, byte: int, seed: int) -> torch.Tensor:
    signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    return (byte + 128 * signs).to(torch.uint8)


def duplicates(*shape: int, seed: int) -> torch.Tensor:
    keys = normal_bytes(*shape, deviation=16, seed=seed)
    return keys[..., torch.arange(shape[-2]) % 3, :] if shape[-2] > 3 else keys


def spaced_source(rows: int, keys: int, ranks: int) -> torch.Tensor:
    return (torch.arange(keys) % ranks).expand(rows, keys)


Maker = Callable[[int], torch.Tensor]
# name: queries [H, 576], keys [2048, 576], geometry
CASES: dict[str, tuple[Maker, Maker, Geometry]] = {
    "flat": (
        lambda seed: normal_bytes(HEADS, 576, deviation=1, seed=seed),
        lambda seed: normal_bytes(2048, 576, deviation=16, seed=seed),
        KIMI,
    ),
    "typical": (
        lambda seed: normal_bytes(HEADS, 576, deviation=16, seed=seed),
        lambda seed: normal_bytes(2048, 576, deviation=16, seed=seed),
        KIMI,
    ),
    "peaked": (
        lambda seed: normal_bytes(HEADS, 576, deviation=80, seed=seed),
        lambda seed: normal_bytes(2048, 576, deviation=16, seed=seed),
        KIMI,
    ),
    "saturated": (
        lambda seed: signed_byte(HEADS, 576, byte=0x7E, seed=seed),
        lambda seed: signed_byte(2048, 576, byte=0x7E, seed=seed),
        replace(KIMI, q_scale=1 / 448, k_scale=1 / 448),
    ),
    "any bytes": (
        lambda seed: any_bytes(HEADS, 576, seed=seed),
        lambda seed: any_bytes(2048, 576, seed=seed),
        replace(KIMI, q_scale=1 / 100, k_scale=1 / 64),
    ),
    "subnormal": (
        lambda seed: any_bytes(HEADS, 576, seed=seed) & 0x87,
        lambda seed: any_bytes(2048, 576, seed=seed) & 0x87,
        replace(KIMI, q_scale=200.0, k_scale=200.0),
    ),
    "tiny scales": (
        lambda seed: normal_bytes(HEADS, 576, deviation=16, seed=seed),
        lambda seed: normal_bytes(2048, 576, deviation=16, seed=seed),
        replace(KIMI, q_scale=2.0**-60, k_scale=2.0**-60),
    ),
    "large scales": (
        lambda seed: normal_bytes(HEADS, 576, deviation=16, seed=seed),
        lambda seed: normal_bytes(2048, 576, deviation=16, seed=seed),
        replace(KIMI, q_scale=1.0, k_scale=1.0),
    ),
    "duplicates": (
        lambda seed: normal_bytes(HEADS, 576, deviation=16, seed=seed),
        lambda seed: duplicates(2048, 576, seed=seed),
        KIMI,
    ),
}


def reference_rows(
    query: torch.Tensor, keys: torch.Tensor, geometry: Geometry, faults: Faults
) -> tuple[torch.Tensor, torch.Tensor]:
    """The FP32 reference of one source for rows that hold COUNTS keys each."""
    out = torch.zeros(len(COUNTS), HEADS, 512, dtype=torch.bfloat16)
    lse = torch.full((len(COUNTS), HEADS), -math.inf)
    for row, count in enumerate(COUNTS):
        if count:
            out[row], lse[row] = partial(query, keys[:count], geometry, faults)
    return out, lse


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arithmetic", ["fp32", "fp32 in another order", "tensor core"])
def test_correct_arithmetic_lies_inside_the_bounds(name: str, arithmetic: str) -> None:
    make_query, make_keys, geometry = CASES[name]
    seed = 1 + list(CASES).index(name)
    query, keys = make_query(seed), make_keys(seed + 100)
    order = tuple(torch.randperm(576, generator=torch.Generator().manual_seed(seed)).tolist())
    faults = {
        "fp32": Faults(),
        "fp32 in another order": Faults(order=order),
        "tensor core": Faults(fraction_bits=23),
    }[arithmetic]
    out, lse = reference_rows(query, keys, geometry, faults)
    every = keys.expand(len(COUNTS), -1, -1)
    expected = oracle.source_partial(
        query.expand(len(COUNTS), -1, -1), every, torch.tensor(COUNTS), geometry, oracle.SEED_FAMILY
    )
    verdict = oracle.verify_partial(out, lse, expected)
    verdict.require(name)
    # Not vacuous: the worst bound of any case is a few BF16 units (2**-8) of the row.
    assert float(verdict.bound_twin.max()) < 6 * 2**-8
    oracle.verify_partial(out, lse * math.log(2), expected, base="ln").require(name)
    wrong_base = oracle.verify_partial(out, lse * math.log(2), expected, base="log2")
    assert not wrong_base.ok
    assert "LSE (base log2)" in wrong_base.problem


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_correct_merge_lies_inside_the_bounds(seed: int, ranks: int) -> None:
    geometry = replace(KIMI, dcp=ranks)
    generator = torch.Generator().manual_seed(seed)
    count = (40, 300, 700)[seed % 3]
    query = normal_bytes(2, HEADS, 576, deviation=(1, 8, 24, 60)[seed % 4], seed=seed)
    keys = normal_bytes(2, count, 576, deviation=16, seed=seed + 50)
    source = torch.randint(-1, ranks, (2, count), generator=generator)
    merged, parts, lse = decode(query, keys, source, geometry)
    verdict = oracle.verify_rows(merged, query, keys, source, geometry, "seed")
    verdict.require("merged")
    # The local route carries the LSE as a natural logarithm and back.
    there_and_back = (lse * torch.tensor(math.log(2))) / torch.tensor(math.log(2))
    oracle.verify_rows(merge(parts, there_and_back), query, keys, source, geometry).require("local route")
    assert bool((verdict.error_oracle <= verdict.bound_oracle).all())
    assert bool((verdict.error_twin <= verdict.bound_twin).all())
    worst = verdict.worst
    assert worst.error / worst.bound == pytest.approx(float((verdict.error_oracle / verdict.bound_oracle).max()))


def test_typical_bounds_are_tight() -> None:
    """Kimi's shape: the twin bound is a BF16 rounding and a few flips, far from the error against the oracle."""
    query = normal_bytes(2, 12, 576, deviation=16, seed=1)
    keys = normal_bytes(2, 2048, 576, deviation=16, seed=2)
    source = spaced_source(2, 2048, 8)
    merged, _, _ = decode(query, keys, source, KIMI)
    verdict = oracle.verify_rows(merged, query, keys, source, KIMI)
    verdict.require("typical")
    # 2**-8 is the worst BF16 rounding of one number; partial and merged rounding each stay below it.
    assert float(verdict.bound_twin.median()) < 2 * 2**-8
    assert float(verdict.bound_twin.max()) < 4 * 2**-8
    assert float(verdict.error_twin.max()) > 2**-10  # what is compared is rounded, so the bound can't be much lower


def wrong_rows(kind: str, query: torch.Tensor, keys: torch.Tensor, source: torch.Tensor, geometry: Geometry):
    """Merged rows with one defect."""
    if kind in ("one wrong column", "rows swapped", "heads rotated"):
        merged, _, _ = decode(query, keys, source, geometry)
        if kind == "one wrong column":
            merged[1, 3, 100] = merged[1, 3, 101]
            return merged
        return merged.flip(0) if kind == "rows swapped" else merged.roll(1, 1)
    if kind == "dropped key":
        keep = torch.arange(keys.shape[1]) != 100
        return decode(query, keys[:, keep], source[:, keep], geometry)[0]
    faults = {
        "LSE base e read as 2": Faults(lse_base=math.e),
        "LSE base 2 read as e": Faults(lse_base=2 ** math.log(2)),
        "chunk not rescaled": Faults(rescale=False),
        "P anchored at the row's max": Faults(anchor="row"),
        "P not scaled to 448": Faults(anchor="one"),
        "another split": Faults(split=8),
        "another chunk": Faults(chunk=32),
        "total of the rounded P": Faults(total_of_rounded=True),
        "BF16 truncated": Faults(truncate_bf16=True),
        "V rows shifted by one key": Faults(v_shift=1),
        "key left out in place": Faults(skip=12),
        "13-bit accumulator": Faults(fraction_bits=13),
    }[kind]
    return decode(query, keys, source, geometry, faults)[0]


# What finds each defect: "oracle" = some (row, head) exceeds bound_oracle, "twin" = just bound_twin,
# "column" = neither norm, only the slack of single columns.
DEFECTS = {
    "one wrong column": "oracle",
    "rows swapped": "oracle",
    "heads rotated": "oracle",
    "dropped key": "oracle",
    "key left out in place": "oracle",
    "LSE base e read as 2": "oracle",
    "LSE base 2 read as e": "oracle",
    "chunk not rescaled": "oracle",
    "V rows shifted by one key": "oracle",
    "P anchored at the row's max": "oracle",
    "P not scaled to 448": "twin",
    "another split": "twin",
    "another chunk": "twin",
    "total of the rounded P": "column",
    "BF16 truncated": "column",
    "13-bit accumulator": "twin",
}


@pytest.mark.parametrize("kind", DEFECTS)
def test_each_defect_is_found(kind: str) -> None:
    # One source with several chunks a CTA where the running max matters, else Kimi's eight sources.
    ranks = 1 if kind in ("chunk not rescaled", "another chunk") else 8
    geometry = replace(KIMI, dcp=ranks)
    query = normal_bytes(2, 8, 576, deviation=16, seed=1)
    keys = normal_bytes(2, 2048, 576, deviation=16, seed=2)
    source = spaced_source(2, 2048, ranks)
    merged = wrong_rows(kind, query, keys, source, geometry)
    verdict = oracle.verify_rows(merged, query, keys, source, geometry)
    assert not verdict.ok
    with pytest.raises(WrongResult, match=r"step 3: row \d+ head \d+"):
        verdict.require("step 3")
    beyond_oracle = bool((verdict.error_oracle > verdict.bound_oracle).any())
    beyond_twin = bool((verdict.error_twin > verdict.bound_twin).any())
    found = "oracle" if beyond_oracle else "twin" if beyond_twin else "column"
    assert found == DEFECTS[kind]


def test_a_small_wrong_column_hides_from_both_norms_but_not_from_its_own_slack() -> None:
    query = normal_bytes(1, 4, 576, deviation=1, seed=1)
    keys = normal_bytes(1, 2048, 576, deviation=16, seed=2)
    source = spaced_source(1, 2048, 8)
    merged, _, _ = decode(query, keys, source, KIMI)
    row = merged[0, 2].float()
    column = int((row.abs() - row.abs().mean() / 20).abs().argmin())
    merged[0, 2, column] *= -1
    verdict = oracle.verify_rows(merged, query, keys, source, KIMI)
    assert bool((verdict.error_oracle <= verdict.bound_oracle).all())
    assert bool((verdict.error_twin <= verdict.bound_twin).all())
    assert not verdict.ok
    assert f"worst column {column} " in verdict.problem


def test_a_nan_where_none_belongs_never_passes() -> None:
    query = normal_bytes(2, 4, 576, deviation=16, seed=1)
    keys = normal_bytes(2, 100, 576, deviation=16, seed=2)
    source = spaced_source(2, 100, 8)
    merged, _, _ = decode(query, keys, source, KIMI)
    for value in (math.nan, math.inf):
        broken = merged.clone()
        broken[1, 2, 77] = value
        verdict = oracle.verify_rows(broken, query, keys, source, KIMI)
        assert verdict.passed.tolist() == [[True] * 4, [True, True, False, True]]
        assert (verdict.worst.row, verdict.worst.head) == (1, 2)


def test_nan_is_required_exactly_where_it_belongs() -> None:
    query = normal_bytes(3, 4, 576, deviation=16, seed=1)
    keys = normal_bytes(3, 100, 576, deviation=16, seed=2)
    source = spaced_source(3, 100, 8).clone()
    source[2, 50:] = -1
    clean, _, _ = decode(query, keys, source, KIMI)
    query[0, 1, 570] = 0xFF  # own (row, head)
    keys[1, 20, 575] = 0x7F  # every head of the row that selects it
    keys[2, 60, 0] = 0x7F  # not selected
    merged = clean.clone()
    canonical = torch.tensor(numerics.BF16_NAN, dtype=torch.int16).view(torch.bfloat16)
    merged[0, 1], merged[1] = canonical, canonical
    assert oracle.verify_rows(merged, query, keys, source, KIMI).ok

    missing = merged.clone()
    missing[1, 3, 500] = 1.0
    assert "canonical NaN" in oracle.verify_rows(missing, query, keys, source, KIMI).problem
    negative = merged.clone()
    negative[0, 1].view(torch.int16)[4] = -1  # an armed half word
    assert not oracle.verify_rows(negative, query, keys, source, KIMI).ok
    too_many = merged.clone()
    too_many[2, 0] = canonical
    assert not oracle.verify_rows(too_many, query, keys, source, KIMI).ok
    too_wide = merged.clone()
    too_wide[0, 2] = canonical
    assert not oracle.verify_rows(too_wide, query, keys, source, KIMI).ok


def test_poisoned_and_empty_partials() -> None:
    query = normal_bytes(3, 2, 576, deviation=16, seed=1)
    keys = normal_bytes(3, 10, 576, deviation=16, seed=2)
    query[1, 0, 3] = query[2, 1, 3] = 0x7F
    counts = torch.tensor([10, 10, 0])
    expected = oracle.source_partial(query, keys, counts, KIMI)
    assert expected.poisoned.tolist() == [[False, False], [True, False], [False, False]]
    out = torch.zeros(3, 2, 512, dtype=torch.bfloat16)
    lse = torch.full((3, 2), -math.inf)
    for row in range(2):
        out[row], lse[row] = partial(query[row], keys[row], KIMI, Faults())
    verdict = oracle.verify_partial(out, lse, expected)
    verdict.require("partial")
    finite = lse.clone()
    finite[1, 0] = 0.0
    assert not oracle.verify_partial(out, finite, expected).ok
    full = lse.clone()
    full[2] = 0.0
    assert not oracle.verify_partial(out, full, expected).ok
    full[2] = math.nan
    assert not oracle.verify_partial(out, full, expected).ok


def test_rows_without_keys_are_exactly_zero() -> None:
    query = normal_bytes(2, 4, 576, deviation=16, seed=1)
    keys = normal_bytes(2, 6, 576, deviation=16, seed=2)
    source = torch.tensor([[-1] * 6, [3] * 6])
    merged, _, _ = decode(query, keys, source, KIMI)
    assert oracle.verify_rows(merged, query, keys, source, KIMI).ok
    merged[0, 0, 0] = 2.0**-130
    verdict = oracle.verify_rows(merged, query, keys, source, KIMI)
    assert "without keys must be zero" in verdict.problem
    nothing = oracle.verify_rows(torch.zeros_like(merged), query, keys[:, :0], source[:, :0], KIMI)
    assert nothing.ok
    assert float(nothing.bound_oracle.max()) == 0.0


def test_zero_values_have_a_zero_reference_norm() -> None:
    """All latent bytes zero: the reference norm is 0, errors are absolute and only zeros pass."""
    query = normal_bytes(1, 2, 576, deviation=16, seed=1)
    keys = normal_bytes(1, 9, 576, deviation=16, seed=2)
    keys[..., :512] = 0
    source = spaced_source(1, 9, 8)
    merged, _, _ = decode(query, keys, source, KIMI)
    assert oracle.verify_rows(merged, query, keys, source, KIMI).ok
    merged[0, 1, 5] = 2.0**-100
    assert not oracle.verify_rows(merged, query, keys, source, KIMI).ok


def test_walking_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query = normal_bytes(5, 3, 576, deviation=16, seed=1)
    cache = normal_bytes(400, 576, deviation=16, seed=2)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 400, (7, 64), generator=generator, dtype=torch.int32)
    valid = torch.tensor([64, 0, 7, 33, 50, 64, 64], dtype=torch.int32)
    for row, count in enumerate(valid.tolist()):
        rows[row, count:] = -1
    whole = oracle.walk_partial(query, cache, rows, valid, KIMI)
    monkeypatch.setattr(oracle, "BLOCK_BYTES", 1)
    single = oracle.walk_partial(query, cache, rows, valid, KIMI)
    # FP64 sums over rows padded to another length.
    torch.testing.assert_close(single.twin, whole.twin, rtol=1e-12, atol=1e-12)
    assert torch.equal(single.empty, whole.empty)
    assert torch.equal(single.twin_lse.isinf(), whole.twin_lse.isinf())
    # A row's references don't depend on the other rows of the batch.
    alone = oracle.walk_partial(query[3:4], cache, rows[3:4], valid[3:4], KIMI)
    torch.testing.assert_close(alone.slack, whole.slack[3:4], rtol=1e-6, atol=0)


def test_the_dealt_assignment_anchors_other_keys_together() -> None:
    values = torch.arange(10.0)[None]
    strided = oracle.Family("s", split=2, chunk=2)
    dealt = oracle.Family("d", split=2, chunk=2, assignment="dealt")
    spread = [family.per_key(family.chunk_max(values, -math.inf), 10)[0].tolist() for family in (strided, dealt)]
    assert spread[0] == [2, 3, 2, 3, 6, 7, 6, 7, 8, 9]
    assert spread[1] == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]
    with pytest.raises(ConfigError, match=r"family = 'wgmma': must be one of seed"):
        oracle.family_named("wgmma")


def test_sources_keep_their_order() -> None:
    keys = torch.arange(6, dtype=torch.uint8)[None, :, None].expand(1, 6, 576)
    source = torch.tensor([[2, 0, -1, 2, 0, 2]])
    split = oracle.split_sources(keys, source, 4)
    assert [part[0, : int(count[0]), 0].tolist() for part, count in split] == [[1, 4], [], [0, 3, 5], []]


def test_decoding_tables_and_roundings_agree_with_the_formats() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    encoded = oracle.Encoded.read(every)
    finite = (every & 0x7F) != 0x7F
    assert torch.equal(encoded.values[finite], numerics.e4m3_values(every, torch.float64)[finite])
    assert encoded.values[~finite].tolist() == [0.0, 0.0]
    values = torch.cat([torch.linspace(0, 448, 100_001), torch.logspace(-4, 2.6, 50_000)]).clamp_max(448).double()
    rounded = numerics.e4m3_values(numerics.e4m3_bytes(values.float()), torch.float64)
    assert torch.equal(oracle.round_e4m3(values.float().double()), rounded)
    floats = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 100
    assert torch.equal(oracle.round_bf16(floats.double()), floats.bfloat16().double())


def test_the_emulated_tensor_core_truncates() -> None:
    """The emulation must err, and more with fewer bits, else the bound was never tried."""
    left, right = torch.randn(4, 576, dtype=torch.float64), torch.randn(576, 30, dtype=torch.float64)
    errors = [
        float((truncating_product(left, right, torch.zeros(4, 30), bits) - left @ right).abs().max())
        for bits in (24, 18, 13)
    ]
    assert 0 < errors[0] < errors[1] < errors[2]


NEEDLE_COUNTS = (2, 3, 31, 256, 511, 513, 2047, 2048)


@pytest.mark.parametrize("count", NEEDLE_COUNTS)
@pytest.mark.parametrize("ranks", [1, 8])
def test_needle_counts_every_key_once(count: int, ranks: int) -> None:
    geometry = replace(KIMI, dcp=ranks)
    query = torch.zeros(1, 2, 576, dtype=torch.uint8)
    for seed in range(2):
        needle = build_needle(count, seed, geometry)
        keys = needle.key_bytes[None]
        source = torch.randint(0, ranks, (1, count), generator=torch.Generator().manual_seed(seed))
        merged, parts, lse = decode(query, keys, source, geometry)
        check_needle(needle, merged)
        if ranks == 1:
            check_needle(needle, parts)
            check_needle_lse(needle, lse)
            check_needle_lse(needle, lse * math.log(2), base="ln")
            with pytest.raises(WrongResult, match="LSE"):
                check_needle_lse(needle, lse, base="ln")
            with pytest.raises(WrongResult, match="LSE"):
                check_needle_lse(needle, lse + math.log2((count + 1) / count))

        lost = count // 2
        keep = torch.arange(count) != lost
        with pytest.raises(WrongResult, match=rf"needle row 0, 0: key {lost} was not counted \(column \d+\)"):
            check_needle(needle, decode(query, keys[:, keep], source[:, keep], geometry)[0])
        twice = torch.cat([torch.arange(count), torch.tensor([lost])])
        with pytest.raises(WrongResult, match=rf"key {lost} was counted twice"):
            check_needle(needle, decode(query, keys[:, twice], source[:, twice], geometry)[0])
        # Two errors that keep the total: the later key in place of the earlier one.
        other = torch.arange(count)
        other[lost] = 0
        with pytest.raises(WrongResult, match="column"):
            check_needle(needle, decode(query, keys[:, other], source[:, other], geometry)[0])
        # A key past the count reads a cache row that no row selects.
        stray = torch.cat([keys, torch.full((1, 1, 576), STRAY_BYTE, dtype=torch.uint8)], 1)
        with pytest.raises(WrongResult, match="columns miscounted"):
            check_needle(needle, decode(query, stray, torch.cat([source, source[:, :1]], 1), geometry)[0])
    poisoned = merged.clone()
    poisoned[0, 1, 9] = math.nan
    with pytest.raises(WrongResult, match=r"needle row 0, 1: .* column 9 "):
        check_needle(needle, poisoned)


def test_needle_refuses_what_it_cannot_code() -> None:
    for count in (0, 2049):
        with pytest.raises(ConfigError, match="needle count"):
            build_needle(count, 0, KIMI)


def test_a_lost_key_of_a_flat_row_hides_from_both_norms() -> None:
    """Why the needle exists: many equal weights, values near each other, one of 2048 keys lost."""
    generator = torch.Generator().manual_seed(4)
    values = 16 + torch.randn(1, 2048, 576, generator=generator)
    keys = numerics.e4m3_bytes(values)
    query = torch.zeros(1, 2, 576, dtype=torch.uint8)
    source = spaced_source(1, 2048, 8)
    keep = torch.arange(2048) != 2047
    merged, _, _ = decode(query, keys[:, keep], source[:, keep], KIMI)
    verdict = oracle.verify_rows(merged, query, keys, source, KIMI)
    assert bool((verdict.error_oracle <= verdict.bound_oracle).all())
    assert bool((verdict.error_twin <= verdict.bound_twin).all())
    needle = build_needle(2048, 0, KIMI)
    with pytest.raises(WrongResult, match="key 2047 was not counted"):
        check_needle(needle, decode(query, needle.key_bytes[None, keep], source[:, keep], KIMI)[0])
