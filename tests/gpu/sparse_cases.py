"""What every sparse decode must do on a GPU, whichever kernel it is: the cases that its test file derives from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from sparse_rank import Inputs, Outputs, SparseRank, make_inputs

from dcp_decode import numerics, oracle
from dcp_decode.errors import WrongResult
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_layout import DecodeConfig, Layout
from dcp_decode.mailbox import CONTROL_BYTES, RECORD_FIELDS, Stage
from dcp_decode.needle import STRAY_BYTE, build_needle, check_needle, check_needle_lse

SHORT_DEADLINE_NANOSECONDS = 200_000_000  # of a wait for a word that never comes
EDGE_COUNTS = [0, 1, 31, 32, 33, 255, 256, 257, 2048, 0, 2, 3, 64, 65, 129, 300, 384, 385, 512, 513]
ROUTES = pytest.mark.parametrize("push", [True, False], ids=["push", "local"])
NAN_BYTES = pytest.mark.parametrize("nan_byte", [0x7F, 0xFF], ids=["positive", "negative"])
NEEDLE_COUNTS = pytest.mark.parametrize("count", [1, 31, 33, 256, 257, 511, 2048])


def as_test_id(make: partial) -> str:
    """Of a configuration's choices."""
    return "-".join(f"{name}{value if isinstance(value, str) else int(value)}" for name, value in make.keywords.items())


def verify(outputs: Outputs, inputs: Inputs, config: DecodeConfig) -> oracle.Verdict:
    """Against oracle and twin; a pushed empty row has no payload (it must still be armed), which the twin calls 0."""
    out = outputs.out.clone()
    empty = inputs.valid[: out.shape[0]] == 0
    if config.push:
        assert bool((out[empty].view(torch.int16) == -1).all()), "an empty row pushed a payload"
        out[empty] = 0
    family = oracle.family_named(config.family)
    expected = oracle.walk_partial(inputs.query, inputs.cache, inputs.rows, inputs.valid, config.geometry, family)
    return oracle.verify_partial(out, outputs.lse, expected, base="log2" if config.push else "ln")


def check_step(
    make: Layout, geometry: Geometry, counts: list[int], push: bool = True, seed: int = 0, rank: int = 0
) -> Outputs:
    """A step on random inputs: right rows, query words re-armed, everything else untouched."""
    ranks = SparseRank(geometry, rank)
    inputs = make_inputs(geometry, counts, seed)
    config = make(geometry, len(counts), push)
    outputs = ranks.step(config, inputs)
    check_mailboxes(ranks, inputs, push)
    verify(outputs, inputs, config).require(config.name)
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


def check_canonical(ranks: SparseRank, inputs: Inputs, config: DecodeConfig) -> None:
    outputs = ranks.step(config, inputs)
    verify(outputs, inputs, config).require("NaN")
    nan = outputs.lse.isnan()
    assert bool((outputs.lse.view(torch.int32)[nan] == numerics.FP32_NAN).all())
    assert bool((outputs.out.view(torch.int16)[nan] == numerics.BF16_NAN).all())
    assert not bool(outputs.out[~nan].isnan().any())


class SparseCases:
    """Test cases of one kernel. A configuration is given as a `sparse_layout.Layout` of (geometry, batch, push).

    variants: all. shapes: those whose code differs. small: one or two for what no shape should change. families: lists
    of those that must agree bitwise.
    """

    variants: Sequence[partial]
    shapes: Sequence[partial]
    small: Sequence[partial]
    families: Sequence[Sequence[partial]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for name, makes in (("variant", self.variants), ("shape", self.shapes), ("small", self.small)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, makes, ids=as_test_id)
        if "family" in metafunc.fixturenames:
            metafunc.parametrize("family", self.families, ids=[as_test_id(makes[0]) for makes in self.families])

    @ROUTES
    def test_every_variant_on_edge_counts(self, variant: Layout, push: bool) -> None:
        check_step(variant, Geometry(capacity=24), EDGE_COUNTS, push, rank=3)

    @ROUTES
    @pytest.mark.parametrize("dcp", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("heads", [64, 96, 128])
    def test_heads_and_ranks(self, small: Layout, heads: int, dcp: int, push: bool) -> None:
        if heads % dcp:
            pytest.skip("heads are a multiple of dcp")
        geometry = Geometry(heads=heads, padded_heads=heads + 32, dcp=dcp, capacity=7)
        check_step(small, geometry, [256, 250, 0, 13, 511], push, seed=heads + dcp, rank=dcp - 1)

    @pytest.mark.parametrize("batch", [1, 2, 5, 6, 8, 17, 40])
    def test_batches(self, small: Layout, batch: int) -> None:
        counts = [(37 * row + 256) % 700 for row in range(batch)]
        check_step(small, Geometry(capacity=40), counts, True, seed=batch, rank=7)

    @pytest.mark.parametrize("width", [1, 3, 64, 200, 2048])
    def test_widths(self, shape: Layout, width: int) -> None:
        """The index loads precede the count, so they must stay inside a narrow row."""
        check_step(shape, Geometry(topk=width, capacity=4), [width, width // 2, 0, 1], True, seed=width)

    def test_all_keys_on_one_rank(self, shape: Layout) -> None:
        check_step(shape, Geometry(capacity=5), [2048] * 5, True, seed=5)

    @pytest.mark.parametrize("generations", [2, 3])
    def test_generations_follow_the_use_counter(self, small: Layout, generations: int) -> None:
        geometry = Geometry(capacity=3, generations=generations)
        ranks = SparseRank(geometry, 2)
        config = small(geometry, 3, True)
        for use in range(2 * generations + 1):
            assert ranks.generation == use % generations
            inputs = make_inputs(geometry, [256, 3, 0], seed=use)
            outputs = ranks.step(config, inputs)
            assert ranks.query_is_armed()
            verify(outputs, inputs, config).require(f"use {use}")
            ranks.rearm_values()

    @ROUTES
    def test_variants_of_a_family_agree_bitwise(self, family: Sequence[partial], push: bool) -> None:
        geometry = Geometry(capacity=len(EDGE_COUNTS))
        ranks = SparseRank(geometry, 1)
        inputs = make_inputs(geometry, EDGE_COUNTS, seed=11)
        reference = ranks.step(family[0](geometry, len(EDGE_COUNTS), push), inputs)
        for make in family[1:]:
            ranks.rearm_values()
            outputs = ranks.step(make(geometry, len(EDGE_COUNTS), push), inputs)
            assert outputs.same_bits(reference), f"{as_test_id(make)} differs from the first variant"

    def test_hundred_repeats_agree_bitwise(self, shape: Layout) -> None:
        geometry = Geometry(capacity=5)
        ranks = SparseRank(geometry, 1)
        inputs = make_inputs(geometry, [256, 0, 257, 40, 2048], seed=12)
        config = shape(geometry, 5, True)
        reference = ranks.step(config, inputs)
        for repeat in range(100):
            ranks.rearm_values()
            assert ranks.step(config, inputs).same_bits(reference), f"repeat {repeat}"

    def test_push_and_local_partials_agree_bitwise(self, shape: Layout) -> None:
        geometry = Geometry(capacity=len(EDGE_COUNTS))
        ranks = SparseRank(geometry, 1)
        inputs = make_inputs(geometry, EDGE_COUNTS, seed=13)
        pushed = ranks.step(shape(geometry, len(EDGE_COUNTS), True), inputs)
        local = ranks.step(shape(geometry, len(EDGE_COUNTS), False), inputs)
        full = inputs.valid > 0
        assert torch.equal(pushed.out[full].view(torch.int16), local.out[full].view(torch.int16))
        # The natural LSE is one FP32 product away from the base-2 one.
        product = pushed.lse * torch.tensor(numerics.LN_2, dtype=torch.float32, device="cuda")
        assert torch.equal(product, local.lse)

    def test_row_order_changes_no_bit(self, shape: Layout) -> None:
        geometry = Geometry(capacity=len(EDGE_COUNTS))
        ranks = SparseRank(geometry, 1)
        inputs = make_inputs(geometry, EDGE_COUNTS, seed=14)
        config = shape(geometry, len(EDGE_COUNTS), True)
        reference = ranks.step(config, inputs)
        order = torch.randperm(len(EDGE_COUNTS), generator=torch.Generator().manual_seed(1)).cuda()
        ranks.rearm_values()
        shuffled = Inputs(inputs.query[order], inputs.cache, inputs.rows[order], inputs.valid[order])
        outputs = ranks.step(config, shuffled)
        assert outputs.same_bits(Outputs(reference.out[order], reference.lse[order]))
        # A batch of the first rows alone, and the rows of another batch size.
        ranks.rearm_values()
        few = Inputs(inputs.query[:9], inputs.cache, inputs.rows[:9], inputs.valid[:9])
        outputs = ranks.step(shape(geometry, 9, True), few)
        assert outputs.same_bits(Outputs(reference.out[:9], reference.lse[:9]))

    def test_graph_replays_agree_with_eager(self, shape: Layout) -> None:
        """Three uses a graph (an odd number), replayed: the generation comes from the counter in device memory."""
        geometry = Geometry(capacity=5)
        ranks = SparseRank(geometry, 4)
        inputs = make_inputs(geometry, [256, 0, 257, 40, 700], seed=15)
        config = shape(geometry, 5, True)
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

    def test_extreme_values(self, shape: Layout) -> None:
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
        config = shape(geometry, 6, True)
        verify(ranks.step(config, inputs), inputs, config).require("extreme values")

    def test_all_codes(self, shape: Layout) -> None:
        """Bytes of every finite code: products that lie up to 36 bits apart meet in one score."""
        geometry = Geometry(capacity=4)
        ranks = SparseRank(geometry, 1)
        inputs = make_inputs(geometry, [256, 1, 300, 2048], seed=25)
        generator = torch.Generator(device="cuda").manual_seed(26)
        for bytes_ in (inputs.query, inputs.cache):
            codes = torch.randint(0, 254, bytes_.shape, generator=generator, device="cuda")
            bytes_.copy_(codes + (codes >= 0x7F))  # neither 0x7F nor 0xFF
        config = shape(geometry, 4, True)
        verify(ranks.step(config, inputs), inputs, config).require("all codes")

    @ROUTES
    @NAN_BYTES
    def test_nan_query_poisons_its_row_and_head_only(self, shape: Layout, nan_byte: int, push: bool) -> None:
        geometry = Geometry(capacity=4)
        ranks = SparseRank(geometry, 1)
        inputs = make_inputs(geometry, [256, 300, 1, 2048], seed=17)
        # A single NaN byte: four 0xFF in a row would be an armed word, which no writer stores.
        for row, head in ((0, 0), (1, 17), (2, 95), (3, 50)):
            inputs.query[row, head, 129] = nan_byte
        check_canonical(ranks, inputs, shape(geometry, 4, push))

    @ROUTES
    @NAN_BYTES
    def test_nan_key_poisons_the_rows_that_select_it(self, shape: Layout, nan_byte: int, push: bool) -> None:
        geometry = Geometry(capacity=6)
        ranks = SparseRank(geometry, 1)
        inputs = make_inputs(geometry, [256, 300, 1, 1500, 4, 2048], seed=18)
        for row, key in ((1, 299), (2, 0), (3, 700), (4, 1)):
            inputs.cache[int(inputs.rows[row, key]), 575 if row == 3 else 100 * row] = nan_byte
        check_canonical(ranks, inputs, shape(geometry, 6, push))

    def test_page_stride_and_ten_million_rows(self, small: Layout) -> None:
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
        config = small(geometry, 5, True)
        verify(SparseRank(geometry, 0).step(config, inputs), inputs, config).require("10 M rows")

    @NEEDLE_COUNTS
    def test_needle_counts_every_key_once(self, shape: Layout, count: int) -> None:
        geometry = Geometry(capacity=2)
        needle = build_needle(count, seed=count, geometry=geometry)
        cache = torch.full((4096, 576), STRAY_BYTE, dtype=torch.uint8, device="cuda")
        rows = torch.full((2, geometry.topk), -1, dtype=torch.int32, device="cuda")
        place = torch.randperm(4096, generator=torch.Generator().manual_seed(count))[:count].cuda()
        cache[place] = needle.key_bytes.cuda()
        rows[:, :count] = place.to(torch.int32)
        query = torch.zeros(2, geometry.heads, 576, dtype=torch.uint8, device="cuda")
        inputs = Inputs(query, cache, rows, torch.full((2,), count, dtype=torch.int32, device="cuda"))
        outputs = SparseRank(geometry, 0).step(shape(geometry, 2, True), inputs)
        check_needle(needle, outputs.out)
        check_needle_lse(needle, outputs.lse)

    def test_a_missing_query_word_ends_in_a_record_and_no_push(self, shape: Layout) -> None:
        geometry = Geometry(capacity=3)
        ranks = SparseRank(geometry, 2)
        inputs = make_inputs(geometry, [256, 256, 0], seed=21)
        config = shape(geometry, 3, True)
        section = ranks.layout.query.words(ranks.mailbox.memory.local)
        ranks.put_query(inputs.query)
        section[0, 1, 37, 5] = -1  # one word of (row 1, head 37), whose owner is rank 3
        torch.cuda.synchronize()
        ranks.launch(config, inputs, deadline_nanoseconds=SHORT_DEADLINE_NANOSECONDS)
        torch.cuda.synchronize()
        assert int(ranks.mailbox.abort_word) == 1
        record = dict(zip(RECORD_FIELDS, ranks.mailbox.record_words.tolist(), strict=False))
        expected = {"stage": 2, "waiting_rank": 2, "source_rank": 3, "row": 1, "head": 37, "word": 5, "use": 0}
        assert {name: record[name] for name in expected} == expected
        assert record["value_seen"] == -1
        assert record["nanoseconds"] >= SHORT_DEADLINE_NANOSECONDS
        outputs = ranks.take_partials(3)
        first = 37 // config.head_rows * config.head_rows
        heads = slice(first, first + config.head_rows)  # of the same CTA
        assert bool((outputs.out[1, heads].view(torch.int16) == -1).all()), "an aborted tile was pushed"
        assert bool((outputs.lse[1, heads].view(torch.int32) == -1).all())
        # The abort word is sticky: the next wait for a missing word returns at once and pushes nothing.
        ranks.rearm_values()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(ranks.stream):
            begin.record()
            ranks.launch(config, inputs)  # whose deadline is far longer
            end.record()
        torch.cuda.synchronize()
        assert begin.elapsed_time(end) < 1000
        assert bool((ranks.take_partials(3).out[1].view(torch.int16) == -1).all())

    def test_nothing_is_pushed_after_an_abort(self, shape: Layout) -> None:
        """Words that an aborted use left behind look arrived: an earlier kernel's abort word alone stops the push."""
        geometry = Geometry(capacity=3)
        ranks = SparseRank(geometry, 2)
        inputs = make_inputs(geometry, [256, 300, 0], seed=24)
        ranks.put_query(inputs.query)
        ranks.mailbox.abort_word.fill_(1)
        torch.cuda.synchronize()
        ranks.launch(shape(geometry, 3, True), inputs)
        torch.cuda.synchronize()
        outputs = ranks.take_partials(3)
        assert bool((outputs.out.view(torch.int16) == -1).all())
        assert bool((outputs.lse.view(torch.int32) == -1).all())

    def test_verdict_finds_one_wrong_column_and_a_wrong_lse(self, small: Layout) -> None:
        """Negative control: one wrong column and a wrong LSE are found."""
        geometry = Geometry(capacity=5)
        ranks = SparseRank(geometry, 0)
        inputs = make_inputs(geometry, [256, 250, 31, 13, 511], seed=22)
        config = small(geometry, 5, True)
        outputs = ranks.step(config, inputs)
        verify(outputs, inputs, config).require("untouched")
        spoiled = Outputs(outputs.out.clone(), outputs.lse.clone())
        spoiled.out[2, 5, 300] *= 1.05
        assert not verify(spoiled, inputs, config).ok
        with pytest.raises(WrongResult):
            verify(Outputs(outputs.out, outputs.lse + 1e-3), inputs, config).require("LSE off")
