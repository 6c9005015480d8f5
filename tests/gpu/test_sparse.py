"""SparseDcpDecode on a GPU: against the FP64 oracle and the twin with derived bounds, and bitwise within its family."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import sparse_checks as checks  # noqa: E402
from sparse_checks import EDGE_COUNTS, NAN_BYTES, NEEDLE_COUNTS, ROUTES, as_test_id  # noqa: E402
from sparse_rank import SparseRank, make_inputs  # noqa: E402

from dcp_decode.geometry import Geometry  # noqa: E402
from dcp_decode.kernels.sparse_layout import sparse_config  # noqa: E402

pytestmark = pytest.mark.gpu

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
SEED = [partial(sparse_config, exchange="partials", **variant) for variant in VARIANTS]
PROBABILITIES = [
    partial(sparse_config, exchange="probabilities", **variant)
    for variant in (
        {"tiles": 1, "buffers": 2},
        {"tiles": 1, "buffers": 1},
        {"tiles": 1, "buffers": 2, "trigger": "start"},
        {"tiles": 1, "buffers": 2, "pdl": False},
        {"tiles": 2, "buffers": 2},
        {"tiles": 2, "buffers": 1},
        {"tiles": 3, "buffers": 1},
        {"tiles": 1, "buffers": 2, "groups": 2},
        {"tiles": 1, "buffers": 1, "groups": 2},
    )
]
every_variant = pytest.mark.parametrize("make", [*SEED, *PROBABILITIES], ids=as_test_id)
# One for each number of tiles, exchange and head groups.
every_shape = pytest.mark.parametrize(
    "make", [*(SEED[n] for n in (0, 2, 8, 11)), *(PROBABILITIES[n] for n in (0, 4, 6, 7))], ids=as_test_id
)
every_exchange = pytest.mark.parametrize("make", [SEED[0], PROBABILITIES[0], PROBABILITIES[7]], ids=as_test_id)


@ROUTES
@every_variant
def test_every_variant_on_edge_counts(make, push):
    checks.check_edge_counts(make, push)


@every_exchange
@ROUTES
@pytest.mark.parametrize("dcp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [64, 96, 128])
def test_heads_and_ranks(heads, dcp, push, make):
    checks.check_heads_and_ranks(make, heads, dcp, push)


@pytest.mark.parametrize("batch", [1, 2, 5, 6, 8, 17, 40])
def test_batches(batch):
    checks.check_batch(sparse_config, batch)


@every_exchange
@pytest.mark.parametrize("width", [1, 3, 64, 200, 2048])
def test_widths(width, make):
    checks.check_width(make, width)


@every_shape
def test_all_keys_on_one_rank(make):
    checks.check_all_keys(make)


@pytest.mark.parametrize("generations", [2, 3])
def test_generations_follow_the_use_counter(generations):
    checks.check_generations(sparse_config, generations)


@pytest.mark.parametrize("variants", [SEED, PROBABILITIES], ids=["seed", "probabilities"])
@ROUTES
def test_variants_of_a_family_agree_bitwise(push, variants):
    checks.check_same_bits(variants, push)


@ROUTES
def test_families_agree_where_their_orders_do(push):
    """The same LSE everywhere; the same rows up to 256 keys, the round in which the order of the sums is the same."""
    geometry = Geometry(capacity=len(EDGE_COUNTS))
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, EDGE_COUNTS, seed=23)
    seed = ranks.step(SEED[0](geometry, len(EDGE_COUNTS), push), inputs)
    ranks.rearm_values()
    other = ranks.step(PROBABILITIES[0](geometry, len(EDGE_COUNTS), push), inputs)
    assert torch.equal(seed.lse.view(torch.int32), other.lse.view(torch.int32))
    one_round = inputs.valid <= 256
    assert torch.equal(seed.out[one_round].view(torch.int16), other.out[one_round].view(torch.int16))
    assert not torch.equal(seed.out[~one_round].view(torch.int16), other.out[~one_round].view(torch.int16))


@every_shape
def test_hundred_repeats_agree_bitwise(make):
    checks.check_repeats(make)


def test_push_and_local_partials_agree_bitwise():
    checks.check_routes_agree(sparse_config)


def test_row_order_changes_no_bit():
    checks.check_row_order(sparse_config)


def test_graph_replays_agree_with_eager():
    checks.check_graph_replays(sparse_config)


def test_extreme_values():
    checks.check_extreme_values(sparse_config)


@every_exchange
def test_all_codes(make):
    checks.check_all_codes(make)


@every_shape
@ROUTES
@NAN_BYTES
def test_nan_query_poisons_its_row_and_head_only(nan_byte, push, make):
    checks.check_nan_query(make, nan_byte, push)


@every_shape
@ROUTES
@NAN_BYTES
def test_nan_key_poisons_the_rows_that_select_it(nan_byte, push, make):
    checks.check_nan_key(make, nan_byte, push)


def test_page_stride_and_ten_million_rows():
    checks.check_ten_million_rows(sparse_config)


@every_shape
@NEEDLE_COUNTS
def test_needle_counts_every_key_once(count, make):
    checks.check_needle_count(make, count)


@every_exchange
def test_a_missing_query_word_ends_in_a_record_and_no_push(make):
    checks.check_missing_query_word(make)


@every_shape
def test_nothing_is_pushed_after_an_abort(make):
    checks.check_abort_stops_pushes(make)


def test_verdict_finds_one_wrong_column_and_a_wrong_lse():
    """Negative control: the checks of this file can fail."""
    checks.check_verdict_can_fail(sparse_config)
