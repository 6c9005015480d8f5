"""The generator: the same bits from any rank, order or device; exact at any position; and plausible numbers."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from dcp_decode import numerics, workload
from dcp_decode.errors import ConfigError
from dcp_decode.geometry import Geometry
from dcp_decode.workload import Purpose, Workload, hashed_word, make_words, mix, normal_quantiles

BITS = (1 << 64) - 1
FAR = (1 << 24) + 1  # the first position that FP32 can't hold
STANDARD_DEVIATIONS = 5  # a right generator leaves this with probability 6e-7, once, when its constants are chosen


@pytest.fixture
def maker() -> Workload:
    return Workload(1, Geometry())


def tokens(*positions: int, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(positions), torch.full((len(positions),), salt)


def span(count: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(start, start + count), torch.zeros(count, dtype=torch.int64)


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def splitmix_finalizer(word: int) -> int:
    """Written out again, on unsigned Python integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & BITS
    return word ^ (word >> 31)


# ---- the hash


def test_mix_is_the_splitmix64_finalizer():
    words = [
        0,
        1,
        BITS,
        1 << 63,
        (1 << 63) - 1,
        0x9E3779B97F4A7C15,
        *(hashed_word(5, Purpose.KEY, i) for i in range(50)),
    ]
    mixed = mix(torch.tensor([signed(word) for word in words]))
    assert mixed.tolist() == [signed(splitmix_finalizer(word)) for word in words]
    # The published generator's first output from seed 0 is the finalizer of its first state.
    assert mixed[5] == signed(0xE220A8397B1DCDAF)


def test_an_arithmetic_shift_would_differ():
    """Negative control: the mask in `mix` matters for negative words."""
    word = torch.tensor([signed(0x9E3779B97F4A7C15)])
    assert ((word ^ (word >> 30)) * signed(0xBF58476D1CE4E5B9)) != (
        (word ^ ((word >> 30) & ((1 << 34) - 1))) * signed(0xBF58476D1CE4E5B9)
    )


def test_hashed_words_of_different_names_differ():
    words = [hashed_word(seed, purpose, *names) for seed in (0, 1, -1, 1 << 70) for purpose in Purpose
             for names in ((), (0,), (0, 0), (0, 1), (1, 0), (-1,))]  # fmt: skip
    # 1 << 70 has the low 64 bits of 0: the only seeds that agree.
    assert len(set(words)) == 3 * len(Purpose) * 6
    assert all(0 <= word <= BITS for word in words)


def test_golden_bits(maker):
    """The bits that every machine, device and torch release must give: a digest of a run depends on them."""
    positions, salts = torch.tensor([0, 1, 63, 5000, FAR, (1 << 40) + 3]), torch.tensor([0, 0, 1, 2, 0, 9])
    parts = (
        maker.key_bytes(2, 3, positions, salts),
        maker.queries(2, 3, positions, salts, range(84, 96)).view(torch.int16),
        maker.index_scores(2, 3, (1 << 40) + 5, 4, positions, salts).view(torch.int32),
    )
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest()[:16] for part in parts]
    assert digests == ["9b6b9d5d8411ede7", "96d4bc16dae3f910", "f76cea6361e155e3"]


# ---- any rank can make any row


@pytest.mark.parametrize("count", [0, 1, workload.ROWS_A_CHUNK - 1, workload.ROWS_A_CHUNK, workload.ROWS_A_CHUNK + 1])
def test_rows_do_not_depend_on_how_many_are_made_together(maker, count):
    positions, salts = span(count, start=7)
    made = maker.key_bytes(0, 1, positions, salts)
    assert made.shape == (count, 576)
    assert made.dtype == torch.uint8
    for row in {0, count // 2, count - 1} if count else ():
        assert torch.equal(made[row], maker.key_bytes(0, 1, positions[row : row + 1], salts[row : row + 1])[0])


def test_order_and_strides_change_nothing(maker):
    positions, salts = span(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    strided = torch.stack((positions, positions), dim=1)[:, 0]
    for make in (
        lambda p, s: maker.key_bytes(1, 2, p, s),
        lambda p, s: maker.queries(1, 2, p, s, range(3)),
        lambda p, s: maker.index_scores(1, 2, 50, 1, p, s),
    ):
        made = make(positions, salts)
        assert torch.equal(make(positions[order], salts[order]), made[order])
        assert torch.equal(make(strided, salts), made)


def test_a_head_does_not_depend_on_the_heads_made_with_it(maker):
    everything = maker.queries(0, 0, *tokens(10, 11), range(96))
    assert everything.shape == (2, 96, 576)
    assert everything.dtype == torch.bfloat16
    for heads in (range(12, 24), range(95, 96), range(0, 96, 7), range(0)):
        assert torch.equal(
            maker.queries(0, 0, *tokens(10, 11), heads), everything[:, heads.start : heads.stop : heads.step]
        )


@pytest.mark.parametrize("heads", [range(90, 97), range(-1, 3)])
def test_heads_outside_the_model_are_refused(maker, heads):
    with pytest.raises(ConfigError, match=r"heads = range\(.*\): must lie in 0 .. 95"):
        maker.queries(0, 0, *tokens(1), heads)


def test_arguments_are_left_as_they_were(maker):
    positions, salts = span(5)
    maker.key_bytes(0, 0, positions, salts)
    maker.queries(0, 0, positions, salts, range(2))
    maker.index_scores(0, 0, 9, 0, positions, salts)
    assert torch.equal(positions, span(5)[0])
    assert torch.equal(salts, span(5)[1])


def test_every_name_makes_another_row(maker):
    """Seed, layer, request, position and salt each change keys and queries, also where FP32 would merge positions."""

    def made(source, layer=0, request=0, position=FAR - 1, salt=0):
        token = tokens(position, salt=salt)
        return source.key_bytes(layer, request, *token), source.queries(layer, request, *token, range(2))

    rows = [made(maker), made(Workload(2, Geometry())), made(maker, layer=1), made(maker, request=1),
            made(maker, position=FAR), made(maker, salt=1), made(maker, position=FAR, salt=1)]  # fmt: skip
    for kind in (0, 1):
        for first in range(len(rows)):
            for second in range(first):
                same = (rows[first][kind] == rows[second][kind]).float().mean()
                # Equal by chance: 1 in 256 of the table's entries, a few more because entries share E4M3 values.
                assert same < 0.2, (kind, first, second)


# ---- keys


@pytest.mark.parametrize("k_scale", [1 / 16, 0.0437, 0.1, 3.7, 1e-3, 2.0**-20, 50.0])
def test_key_rows_quantize_to_key_bytes(k_scale):
    source = Workload(1, Geometry(k_scale=k_scale))
    encoded = source.key_bytes(0, 0, *span(3000))
    rows = source.key_rows(0, 0, *span(3000))
    assert rows.dtype == torch.bfloat16
    assert torch.equal(numerics.quantize_e4m3(rows, k_scale), encoded)
    magnitude = encoded & 0x7F
    assert magnitude.max() < numerics.E4M3_NAN, "no NaN"
    if k_scale == 1e-3:
        assert magnitude.max() == 0x7E, "values beyond the format saturate"


def test_quantizing_by_another_scale_is_seen(maker):
    """Negative control for the round trip."""
    rows = maker.key_rows(0, 0, *span(10))
    assert not torch.equal(numerics.quantize_e4m3(rows, 1 / 15), maker.key_bytes(0, 0, *span(10)))


def test_table_is_a_normal_distribution():
    table = normal_quantiles().double()
    assert table.shape == (256,)
    assert torch.equal(table, -table.flip(0))
    assert bool((table.diff() > 0).all())
    # Half a quantile's worth at each place: P(Z < table[i]) is (i + 0.5) / 256 up to the rounding to 1/1024,
    # 2**-11 times the largest density.
    below = 0.5 * (1 + torch.erf(table / math.sqrt(2)))
    assert (below - (torch.arange(256) + 0.5) / 256).abs().max() <= 2**-11 / math.sqrt(2 * math.pi)


def test_random_bytes_are_uniform():
    counts = make_words(mix(torch.arange(20_000))).view(torch.uint8).flatten().bincount(minlength=256).double()
    expected = 20_000 * 576 / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 255) < STANDARD_DEVIATIONS * math.sqrt(2 * 255)


def test_words_of_a_row_and_neighbouring_rows_are_uncorrelated():
    values = normal_quantiles()[make_words(mix(torch.arange(4096))).view(torch.uint8).long()]
    for first, second in ((values[1:], values[:-1]), (values[:, 8:], values[:, :-8]), (values[:, 1:], values[:, :-1])):
        assert abs((first * second).mean()) < STANDARD_DEVIATIONS / math.sqrt(first.numel())


def heavy_keys(source: Workload, positions: torch.Tensor) -> torch.Tensor:
    return source._heavy(0, 0, positions, torch.zeros_like(positions))


def test_key_values_are_normal_and_heavy_ones_twice_as_large(maker):
    positions, salts = span(40_000)
    values = numerics.e4m3_values(maker.key_bytes(0, 0, positions, salts)) * Geometry().k_scale
    heavy = heavy_keys(maker, positions)
    share = 1 / (workload.HEAVY_MASK + 1)
    assert abs(heavy.double().mean() - share) < STANDARD_DEVIATIONS * math.sqrt(share / 40_000)
    for rows, factor in ((values[~heavy], 1), (values[heavy][:, 64:], 2)):
        noise = STANDARD_DEVIATIONS * factor / math.sqrt(rows.numel())
        assert abs(rows.mean()) < noise
        # E4M3 rounds by at most 1/16 of a value either way, and the errors nearly cancel in the mean.
        assert abs(rows.std() / factor - 1) < 1 / 32 + noise


def test_some_rows_attend_to_few_keys_and_others_to_many(maker):
    """Effective number of keys, 1 / sum(p ** 2), of softmax rows over a top-k selection of a 50,000-token context."""
    positions, salts = span(50_000)
    selected = maker.index_scores(0, 0, 49_999, 1, positions, salts).topk(2048).indices
    keys = maker.key_rows(0, 0, selected, torch.zeros_like(selected)).float()
    queries = maker.queries(0, 0, *tokens(*range(49_990, 50_000), salt=1), range(96)).float()
    weights = (torch.einsum("rhd,kd->rhk", queries, keys) * Geometry().softmax_scale).softmax(-1)
    effective = (1 / weights.square().sum(-1)).flatten()
    assert (effective < 4).double().mean() > 0.05
    assert (effective > 50).double().mean() > 0.05


def test_query_values_are_normal(maker):
    values = maker.queries(0, 0, *span(60), range(96)).double()
    noise = STANDARD_DEVIATIONS / math.sqrt(values[..., 64:].numel())
    assert abs(values[..., 64:].mean()) < noise
    # BF16 rounds by at most 2**-9 of a value, and 256 quantiles leave out tails that hold 1 % of the variance.
    assert abs(values[..., 64:].std() - 1) < 0.01 + noise
    aligned = (values[..., :64] == values[..., :64].flatten(0, 1).mode(0).values).all(-1)
    share = 1 / (workload.ALIGNED_MASK + 1)
    assert abs(aligned.double().mean() - share) < STANDARD_DEVIATIONS * math.sqrt(share / aligned.numel())


# ---- index scores


def test_scores_are_coarse_exact_and_bounded(maker):
    scores = maker.index_scores(0, 0, 99_999, 1, *span(100_000))
    assert scores.dtype == torch.float32
    integers = scores.double() * 2**workload.SCORE_FRACTION_BITS
    assert torch.equal(integers, integers.round())
    assert integers.min() >= 0
    assert integers.max() < 1 << 16
    border = scores.topk(2048).values[-1]
    assert (scores == border).sum() > 1, "a tie at the border of the selection"


def test_sinks_come_first_and_recent_keys_are_favoured(maker):
    scores = maker.index_scores(0, 0, 49_999, 1, *span(50_000))
    order = scores.argsort(descending=True)
    assert set(order[: workload.SINKS].tolist()) == set(range(workload.SINKS))
    selected = torch.zeros(50_000, dtype=torch.bool)
    selected[order[:2048]] = True
    recent = selected[-64:].double().mean()
    assert recent > 0.9
    assert selected[1000:-1000].double().mean() < 0.05


def leading(source: Workload, row: int) -> torch.Tensor:
    """bool [20,000]: the keys, sinks left out, whose score at `row` is above any that has no bonus (11 + 10 bits)."""
    scores = source.index_scores(0, 0, row, 1, *span(20_000))
    scores[: workload.SINKS] = 0
    return scores >= (1 << 12) * 2.0**-workload.SCORE_FRACTION_BITS


def test_half_of_the_heavy_keys_lead_and_change_with_the_epoch(maker):
    row = 30_000 - 30_000 % workload.EPOCH_TOKENS
    heavy = heavy_keys(maker, span(20_000)[0])
    count = int(heavy[workload.SINKS :].sum())
    here, neighbour = leading(maker, row), leading(maker, row + workload.EPOCH_TOKENS - 1)
    later = leading(maker, row + workload.EPOCH_TOKENS)
    assert bool(heavy[here].all())
    assert torch.equal(here, neighbour), "neighbouring rows share their hitters"
    noise = STANDARD_DEVIATIONS * 0.5 / math.sqrt(count)
    assert abs(int(here.sum()) / count - 0.5) < noise
    assert abs(int((here ^ later).sum()) / count - 0.5) < noise, "another epoch draws the halves again"


def test_each_row_selects_its_own(maker):
    def selected(row: int, salt: int) -> set[int]:
        return set(maker.index_scores(0, 0, row, salt, *span(20_000)).topk(512).indices.tolist())

    first = selected(30_001, 1)
    for other in (selected(30_002, 1), selected(30_001, 2)):
        assert workload.SINKS < len(first & other) < 512


def test_scores_of_far_positions_are_exact(maker):
    """Distances are differences of integers: shifting far beyond FP32 keeps the recency ramp."""
    for start in (0, FAR, 1 << 40):
        positions, salts = span(1000, start=start + workload.SINKS)
        row = int(positions[-1])
        scores = (maker.index_scores(0, 0, row, 1, positions, salts) * 2**workload.SCORE_FRACTION_BITS).long()
        heavy = heavy_keys(maker, positions)
        recency = 16 * (positions - (row - workload.RECENT_TOKENS)).clamp(0)
        rest = (scores - recency)[~heavy]
        assert bool((rest >= 0).all())
        assert bool((rest < 1024 + 2048).all())


def test_salts_change_scores(maker):
    same = maker.index_scores(0, 0, 500, 1, *tokens(*range(500))) == maker.index_scores(
        0, 0, 500, 1, *tokens(*range(500), salt=1)
    )
    assert same[workload.SINKS :].double().mean() < 0.02


# ---- devices


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_makes_the_same_bits(maker):
    positions = torch.cat((torch.arange(3000), torch.arange(FAR - 5, FAR + 5), torch.tensor([(1 << 40) + 1])))
    salts = positions % 3
    for make in (
        lambda p, s: maker.key_bytes(1, 2, p, s),
        lambda p, s: maker.key_rows(1, 2, p, s).view(torch.int16),
        lambda p, s: maker.queries(1, 2, p[-40:], s[-40:], range(12, 24)).view(torch.int16),
        lambda p, s: maker.index_scores(1, 2, (1 << 40) + 2, 3, p, s).view(torch.int32),
    ):
        made = make(positions.cuda(), salts.cuda())
        assert made.is_cuda
        assert torch.equal(made.cpu(), make(positions, salts))
