"""SparseDcpDecode on a GPU: against the FP64 oracle and the twin with derived bounds, and bitwise within its family."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from sparse_rank import Inputs, Outputs, SparseRank, make_inputs  # noqa: E402

from dcp_decode import numerics, oracle  # noqa: E402
from dcp_decode.errors import WrongResult  # noqa: E402
from dcp_decode.geometry import Geometry  # noqa: E402
from dcp_decode.kernels.sparse_config import EXCHANGES  # noqa: E402
from dcp_decode.kernels.sparse_layout import sparse_config  # noqa: E402
from dcp_decode.mailbox import CONTROL_BYTES, RECORD_FIELDS, Stage  # noqa: E402
from dcp_decode.needle import STRAY_BYTE, build_needle, check_needle, check_needle_lse  # noqa: E402

pytestmark = pytest.mark.gpu

EDGE_COUNTS = [0, 1, 31, 32, 33, 255, 256, 257, 2048, 0, 2, 3, 64, 65, 129, 300]
ROUTES = [True, False]
VARIANTS = [
    {"tiles": 1, "bulk": False, "buffers": 2},
    {"tiles": 1, "bulk": False, "buffers": 1},
    {"tiles": 1, "bulk": True, "buffers": 2},
    {"tiles": 1, "bulk": True, "buffers": 1},
    {"tiles": 1, "bulk": False, "buffers": 2, "trigger": "start"},
    {"tiles": 1, "bulk": False, "buffers": 2, "trigger": "end"},
    {"tiles": 1, "bulk": False, "buffers": 2, "pdl": False},
    {"tiles": 2, "bulk": False, "buffers": 2},
    {"tiles": 2, "bulk": True, "buffers": 2},
    {"tiles": 2, "bulk": True, "buffers": 1},
    {"tiles": 3, "bulk": False, "buffers": 1},
    {"tiles": 3, "bulk": True, "buffers": 1},
]
PROBABILITIES = [
    {"exchange": "probabilities", "tiles": 1, "buffers": 2},
    {"exchange": "probabilities", "tiles": 1, "buffers": 1},
    {"exchange": "probabilities", "tiles": 1, "buffers": 2, "trigger": "start"},
    {"exchange": "probabilities", "tiles": 1, "buffers": 2, "pdl": False},
    {"exchange": "probabilities", "tiles": 2, "buffers": 2},
    {"exchange": "probabilities", "tiles": 2, "buffers": 1},
    {"exchange": "probabilities", "tiles": 3, "buffers": 1},
]
SEED = [{"exchange": "partials"} | variant for variant in VARIANTS]
ALL = [*SEED, *PROBABILITIES]
# One for each number of tiles and exchange.
SHAPES = [SEED[0], SEED[2], SEED[8], SEED[11], PROBABILITIES[0], PROBABILITIES[4], PROBABILITIES[6]]


def as_test_id(variant: dict) -> str:
    return "-".join(f"{name}{value if isinstance(value, str) else int(value)}" for name, value in variant.items())


def verify(outputs: Outputs, inputs: Inputs, geometry: Geometry, push: bool) -> oracle.Verdict:
    """Against oracle and twin; a pushed empty row has no payload (it must still be armed), which the twin calls 0."""
    out = outputs.out.clone()
    empty = inputs.valid[: out.shape[0]] == 0
    if push:
        assert bool((out[empty].view(torch.int16) == -1).all()), "an empty row pushed a payload"
        out[empty] = 0
    expected = oracle.walk_partial(inputs.query, inputs.cache, inputs.rows, inputs.valid, geometry)
    return oracle.verify_partial(out, outputs.lse, expected, base="log2" if push else "ln")


def check_step(geometry: Geometry, counts: list[int], push: bool, seed: int = 0, rank: int = 0, **choices) -> Outputs:
    """A step on random inputs: right rows, query words re-armed, everything else untouched."""
    ranks = SparseRank(geometry, rank)
    inputs = make_inputs(geometry, counts, seed)
    config = sparse_config(geometry, len(counts), push, **choices)
    outputs = ranks.step(config, inputs)
    check_mailboxes(ranks, inputs, push)
    verify(outputs, inputs, geometry, push).require(config.name)
    return outputs


def check_mailboxes(ranks: SparseRank, inputs: Inputs, push: bool) -> None:
    """After one use from armed mailboxes: only the rank's own slots of the real rows were written."""
    assert ranks.query_is_armed()
    assert int(ranks.mailbox.use_counter(Stage.QUERY)) == 1
    assert int(ranks.mailbox.abort_word) == 0
    batch = inputs.query.shape[0]
    for mailbox in ranks.mailboxes:
        region = mailbox.memory.local.clone()
        if push:
            payload = ranks.layout.payload.view(region)[0, ranks.rank, :batch]
            payload.view(torch.int16).fill_(-1)
            ranks.layout.lse_log2.view(region)[0, ranks.rank, :batch].view(torch.int32).fill_(-1)
        assert bool((region[CONTROL_BYTES:] == 0xFF).all()), "bytes outside the used rows were written"


@pytest.mark.parametrize("push", ROUTES, ids=["push", "local"])
@pytest.mark.parametrize("variant", ALL, ids=as_test_id)
def test_every_variant_on_edge_counts(variant, push):
    check_step(Geometry(capacity=24), EDGE_COUNTS, push, rank=3, **variant)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("push", ROUTES, ids=["push", "local"])
@pytest.mark.parametrize("dcp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [64, 96, 128])
def test_heads_and_ranks(heads, dcp, push, exchange):
    if heads % dcp:
        pytest.skip("heads are a multiple of dcp")
    geometry = Geometry(heads=heads, padded_heads=heads + 32, dcp=dcp, capacity=7)
    check_step(geometry, [256, 250, 0, 13, 511], push, seed=heads + dcp, rank=dcp - 1, tiles=1, exchange=exchange)


@pytest.mark.parametrize("batch", [1, 2, 5, 6, 8, 17, 40])
def test_batches(batch):
    counts = [(37 * row + 256) % 700 for row in range(batch)]
    check_step(Geometry(capacity=40), counts, True, seed=batch, rank=7)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("width", [1, 3, 64, 200, 2048])
def test_widths(width, exchange):
    """The index loads precede the count, so they must stay inside a narrow row."""
    geometry = Geometry(topk=width, capacity=4)
    check_step(geometry, [width, width // 2, 0, 1], True, seed=width, tiles=1, exchange=exchange)


@pytest.mark.parametrize("variant", SHAPES, ids=as_test_id)
def test_all_keys_on_one_rank(variant):
    check_step(Geometry(capacity=5), [2048] * 5, True, seed=5, **variant)


@pytest.mark.parametrize("generations", [2, 3])
def test_generations_follow_the_use_counter(generations):
    geometry = Geometry(capacity=3, generations=generations)
    ranks = SparseRank(geometry, 2)
    config = sparse_config(geometry, 3)
    for use in range(2 * generations + 1):
        assert ranks.generation == use % generations
        inputs = make_inputs(geometry, [256, 3, 0], seed=use)
        outputs = ranks.step(config, inputs)
        assert ranks.query_is_armed()
        verify(outputs, inputs, geometry, True).require(f"use {use}")
        ranks.rearm_values()


@pytest.mark.parametrize("variants", [SEED, PROBABILITIES], ids=["seed", "probabilities"])
@pytest.mark.parametrize("push", ROUTES, ids=["push", "local"])
def test_variants_of_a_family_agree_bitwise(push, variants):
    geometry = Geometry(capacity=len(EDGE_COUNTS))
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, EDGE_COUNTS, seed=11)
    reference = ranks.step(sparse_config(geometry, len(EDGE_COUNTS), push, **variants[0]), inputs)
    for variant in variants[1:]:
        ranks.rearm_values()
        outputs = ranks.step(sparse_config(geometry, len(EDGE_COUNTS), push, **variant), inputs)
        assert outputs.same_bits(reference), f"{as_test_id(variant)} differs from the first variant"


@pytest.mark.parametrize("push", ROUTES, ids=["push", "local"])
def test_families_agree_where_their_orders_do(push):
    """The same LSE everywhere; the same rows up to 256 keys, the round in which the order of the sums is the same."""
    geometry = Geometry(capacity=len(EDGE_COUNTS))
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, EDGE_COUNTS, seed=23)
    seed = ranks.step(sparse_config(geometry, len(EDGE_COUNTS), push, **SEED[0]), inputs)
    ranks.rearm_values()
    other = ranks.step(sparse_config(geometry, len(EDGE_COUNTS), push, **PROBABILITIES[0]), inputs)
    assert torch.equal(seed.lse.view(torch.int32), other.lse.view(torch.int32))
    one_round = inputs.valid <= 256
    assert torch.equal(seed.out[one_round].view(torch.int16), other.out[one_round].view(torch.int16))
    assert not torch.equal(seed.out[~one_round].view(torch.int16), other.out[~one_round].view(torch.int16))


@pytest.mark.parametrize("variant", SHAPES, ids=as_test_id)
def test_hundred_repeats_agree_bitwise(variant):
    geometry = Geometry(capacity=5)
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, [256, 0, 257, 40, 2048], seed=12)
    config = sparse_config(geometry, 5, True, **variant)
    reference = ranks.step(config, inputs)
    for repeat in range(100):
        ranks.rearm_values()
        assert ranks.step(config, inputs).same_bits(reference), f"repeat {repeat}"


def test_push_and_local_partials_agree_bitwise():
    geometry = Geometry(capacity=len(EDGE_COUNTS))
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, EDGE_COUNTS, seed=13)
    pushed = ranks.step(sparse_config(geometry, len(EDGE_COUNTS), True), inputs)
    local = ranks.step(sparse_config(geometry, len(EDGE_COUNTS), False), inputs)
    full = inputs.valid > 0
    assert torch.equal(pushed.out[full].view(torch.int16), local.out[full].view(torch.int16))
    # The natural LSE is one FP32 product away from the base-2 one.
    product = pushed.lse * torch.tensor(numerics.LN_2, dtype=torch.float32, device="cuda")
    assert torch.equal(product, local.lse)


def test_row_order_changes_no_bit():
    geometry = Geometry(capacity=len(EDGE_COUNTS))
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, EDGE_COUNTS, seed=14)
    config = sparse_config(geometry, len(EDGE_COUNTS))
    reference = ranks.step(config, inputs)
    order = torch.randperm(len(EDGE_COUNTS), generator=torch.Generator().manual_seed(1)).cuda()
    ranks.rearm_values()
    shuffled = Inputs(inputs.query[order], inputs.cache, inputs.rows[order], inputs.valid[order])
    outputs = ranks.step(config, shuffled)
    assert outputs.same_bits(Outputs(reference.out[order], reference.lse[order]))
    # A batch of the first rows alone, and the rows of another batch size.
    ranks.rearm_values()
    few = Inputs(inputs.query[:9], inputs.cache, inputs.rows[:9], inputs.valid[:9])
    outputs = ranks.step(sparse_config(geometry, 9), few)
    assert outputs.same_bits(Outputs(reference.out[:9], reference.lse[:9]))


def test_graph_replays_agree_with_eager():
    """Three uses a graph (an odd number), replayed: the generation comes from the counter in device memory."""
    geometry = Geometry(capacity=5)
    ranks = SparseRank(geometry, 4)
    inputs = make_inputs(geometry, [256, 0, 257, 40, 700], seed=15)
    config = sparse_config(geometry, 5)
    reference = ranks.step(config, inputs)
    ranks.rearm_values()
    layout, region = ranks.layout, ranks.mailbox.memory.local
    queries = layout.query.view(region)
    counter = ranks.mailbox.use_counter(Stage.SPARSE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ranks.stream):
        for _ in range(3):
            # Both generations hold the query, so the one in use is filled whichever it is.
            queries[:, :5, : geometry.heads] = inputs.query
            ranks.launch(config, inputs)
            counter.add_(1)
    for replay in range(3):
        first = ranks.generation
        graph.replay()
        torch.cuda.synchronize()
        assert ranks.generation == (first + 3) % 2
        for use in range(2):
            ranks.mailbox.use_counter(Stage.SPARSE).fill_(use)
            assert ranks.take_partials(5).same_bits(reference), f"replay {replay} generation {use}"
        counter.fill_((first + 3) % 2)


def test_extreme_values():
    geometry = Geometry(capacity=6)
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, [256, 256, 256, 256, 256, 256], seed=16)
    rows = inputs.rows.to(torch.int64)
    cache, query = inputs.cache, inputs.query
    query[0, :, :] = 0x7E  # +448 in every byte: the largest scores
    cache[rows[0, 0]] = 0x7E
    cache[rows[0, 1]] = 0xFE  # -448
    cache[rows[1, :256]] = (cache[rows[1, :256]] & 0x80) | 1  # the smallest subnormals
    query[2] = 0x80  # -0
    cache[rows[3, :256]] = 0x80
    query[4, 7] = 0x01
    cache[rows[5, :256]] = 0x7E  # duplicates: equal saturated keys
    outputs = ranks.step(sparse_config(geometry, 6), inputs)
    verify(outputs, inputs, geometry, True).require("extreme values")


@pytest.mark.parametrize("variant", SHAPES, ids=as_test_id)
@pytest.mark.parametrize("push", ROUTES, ids=["push", "local"])
@pytest.mark.parametrize("nan_byte", [0x7F, 0xFF], ids=["positive", "negative"])
def test_nan_query_poisons_its_row_and_head_only(nan_byte, push, variant):
    geometry = Geometry(capacity=4)
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, [256, 300, 1, 2048], seed=17)
    # A single NaN byte: four 0xFF in a row would be an armed word, which no writer stores.
    for row, head in ((0, 0), (1, 17), (2, 95), (3, 50)):
        inputs.query[row, head, 129] = nan_byte
    check_canonical(ranks, inputs, geometry, push, variant)


@pytest.mark.parametrize("variant", SHAPES, ids=as_test_id)
@pytest.mark.parametrize("push", ROUTES, ids=["push", "local"])
@pytest.mark.parametrize("nan_byte", [0x7F, 0xFF], ids=["positive", "negative"])
def test_nan_key_poisons_the_rows_that_select_it(nan_byte, push, variant):
    geometry = Geometry(capacity=6)
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, [256, 300, 1, 1500, 4, 2048], seed=18)
    for row, key in ((1, 299), (2, 0), (3, 700), (4, 1)):
        inputs.cache[int(inputs.rows[row, key]), 575 if row == 3 else 100 * row] = nan_byte
    check_canonical(ranks, inputs, geometry, push, variant)


def check_canonical(ranks: SparseRank, inputs: Inputs, geometry: Geometry, push: bool, variant: dict) -> None:
    outputs = ranks.step(sparse_config(geometry, inputs.query.shape[0], push, **variant), inputs)
    verify(outputs, inputs, geometry, push).require("NaN")
    nan = outputs.lse.isnan()
    assert bool((outputs.lse.view(torch.int32)[nan] == numerics.FP32_NAN).all())
    assert bool((outputs.out.view(torch.int16)[nan] == numerics.BF16_NAN).all())
    assert not bool(outputs.out[~nan].isnan().any())


def test_page_stride_and_ten_million_rows():
    """Flat rows far above 2**31 bytes, in pages that are wider than their 64 tokens."""
    geometry = Geometry(capacity=5, page_stride_rows=96)
    cache_rows = 10_000_000
    inputs = make_inputs(geometry, [256, 2048, 33, 0, 700], seed=19)
    cache = torch.empty(cache_rows, 576, dtype=torch.uint8, device="cuda")
    cache.fill_(0x7F)  # NaN: a wrong row can't go unnoticed
    generator = torch.Generator(device="cuda").manual_seed(20)
    pages = torch.randperm(cache_rows // 96 - 1, generator=generator, device="cuda")[: 5 * 2048]
    offsets = torch.randint(0, 64, (5 * 2048,), generator=generator, device="cuda")
    rows = (pages * 96 + offsets).view(5, 2048)
    rows[0, 0] = cache_rows - 1
    cache[rows.flatten()] = inputs.cache[torch.arange(5 * 2048, device="cuda") % inputs.cache.shape[0]]
    rows = torch.where(inputs.rows < 0, -1, rows).to(torch.int32)
    assert int(rows.max()) * 576 > 2**32
    inputs = Inputs(inputs.query, cache, rows, inputs.valid)
    ranks = SparseRank(geometry, 0)
    outputs = ranks.step(sparse_config(geometry, 5), inputs)
    verify(outputs, inputs, geometry, True).require("10 M rows")


@pytest.mark.parametrize("variant", SHAPES, ids=as_test_id)
@pytest.mark.parametrize("count", [1, 31, 33, 256, 257, 511, 2048])
def test_needle_counts_every_key_once(count, variant):
    geometry = Geometry(capacity=2)
    needle = build_needle(count, seed=count, geometry=geometry)
    cache = torch.full((4096, 576), STRAY_BYTE, dtype=torch.uint8, device="cuda")
    rows = torch.full((2, geometry.topk), -1, dtype=torch.int32, device="cuda")
    place = torch.randperm(4096, generator=torch.Generator().manual_seed(count))[:count].cuda()
    cache[place] = needle.key_bytes.cuda()
    rows[:, :count] = place.to(torch.int32)
    query = torch.zeros(2, geometry.heads, 576, dtype=torch.uint8, device="cuda")
    inputs = Inputs(query, cache, rows, torch.full((2,), count, dtype=torch.int32, device="cuda"))
    outputs = SparseRank(geometry, 0).step(sparse_config(geometry, 2, True, **variant), inputs)
    check_needle(needle, outputs.out)
    check_needle_lse(needle, outputs.lse)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_missing_query_word_ends_in_a_record_and_no_push(exchange):
    geometry = Geometry(capacity=3)
    ranks = SparseRank(geometry, 2)
    inputs = make_inputs(geometry, [256, 256, 0], seed=21)
    config = sparse_config(geometry, 3, tiles=1, exchange=exchange)
    section = ranks.layout.query.words(ranks.mailbox.memory.local)
    ranks.put_query(inputs.query)
    section[0, 1, 37, 5] = -1  # one word of (row 1, head 37), whose owner is rank 3
    torch.cuda.synchronize()
    ranks.launch(config, inputs)
    torch.cuda.synchronize()
    assert int(ranks.mailbox.abort_word) == 1
    record = dict(zip(RECORD_FIELDS, ranks.mailbox.record_words.tolist(), strict=False))
    expected = {"stage": 2, "waiting_rank": 2, "source_rank": 3, "row": 1, "head": 37, "word": 5, "use": 0}
    assert {name: record[name] for name in expected} == expected
    assert record["value_seen"] == -1
    assert record["nanoseconds"] >= 200_000_000
    outputs = ranks.take_partials(3)
    assert bool((outputs.out[1, 32:48].view(torch.int16) == -1).all()), "an aborted tile was pushed"
    assert bool((outputs.lse[1, 32:48].view(torch.int32) == -1).all())
    # The abort word is sticky: the next wait for a missing word returns at once and pushes nothing.
    ranks.rearm_values()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(ranks.stream):
        begin.record()
        ranks.launch(config, inputs)
        end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) < 100
    assert bool((ranks.take_partials(3).out[1].view(torch.int16) == -1).all())


@pytest.mark.parametrize("variant", SHAPES, ids=as_test_id)
def test_nothing_is_pushed_after_an_abort(variant):
    """Words that an aborted use left behind look arrived: the abort word of an earlier kernel alone stops the push."""
    geometry = Geometry(capacity=3)
    ranks = SparseRank(geometry, 2)
    inputs = make_inputs(geometry, [256, 300, 0], seed=24)
    ranks.put_query(inputs.query)
    ranks.mailbox.abort_word.fill_(1)
    torch.cuda.synchronize()
    ranks.launch(sparse_config(geometry, 3, **variant), inputs)
    torch.cuda.synchronize()
    outputs = ranks.take_partials(3)
    assert bool((outputs.out.view(torch.int16) == -1).all())
    assert bool((outputs.lse.view(torch.int32) == -1).all())


def test_verdict_finds_one_wrong_column_and_a_wrong_lse():
    """Negative control: the checks of this file can fail."""
    geometry = Geometry(capacity=5)
    ranks = SparseRank(geometry, 0)
    inputs = make_inputs(geometry, [256, 250, 31, 13, 511], seed=22)
    outputs = ranks.step(sparse_config(geometry, 5), inputs)
    verify(outputs, inputs, geometry, True).require("untouched")
    spoiled = Outputs(outputs.out.clone(), outputs.lse.clone())
    spoiled.out[2, 5, 300] *= 1.05
    assert not verify(spoiled, inputs, geometry, True).ok
    with pytest.raises(WrongResult):
        verify(Outputs(outputs.out, outputs.lse + 1e-3), inputs, geometry, True).require("LSE off")
