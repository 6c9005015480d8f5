"""SparseWarpgroups on a GPU: what is asked of SparseDcpDecode (`test_sparse`), over heads, CTAs and chunks."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs wgmma: a GPU of compute capability 9.0", allow_module_level=True)

import sparse_checks as checks  # noqa: E402
from sparse_checks import NAN_BYTES, NEEDLE_COUNTS, ROUTES, as_test_id  # noqa: E402

from dcp_decode.kernels.sparse_layout import HEAD_ROWS  # noqa: E402
from dcp_decode.kernels.warpgroup_config import MAX_CLUSTER, WarpgroupConfig  # noqa: E402

pytestmark = pytest.mark.gpu

# (heads of a CTA, CTAs that share a row's keys, keys of a chunk, head groups that load them together)
SIZES = [
    (32, 1, 256, 1), (32, 1, 128, 1), (32, 1, 64, 1), (32, 2, 256, 1), (32, 2, 128, 1), (32, 4, 64, 1), (32, 8, 256, 1),
    (24, 1, 256, 1), (24, 2, 256, 1), (24, 4, 128, 1), (16, 1, 256, 1), (16, 2, 128, 1), (16, 4, 64, 1),
    (16, 4, 256, 1), (16, 8, 64, 1), (8, 1, 256, 1), (8, 2, 128, 1), (8, 4, 64, 1), (8, 8, 64, 1), (8, 8, 256, 1),
    (32, 1, 256, 3), (32, 2, 256, 3), (24, 1, 256, 2), (16, 1, 256, 3), (16, 1, 256, 6), (16, 2, 128, 3),
    (16, 4, 64, 2), (16, 4, 256, 2), (8, 1, 256, 4), (8, 2, 128, 2), (8, 4, 64, 2),
]  # fmt: skip


def of_size(head_rows: int, split: int, chunk: int, groups: int = 1, **choices: object) -> partial:
    return partial(WarpgroupConfig, head_rows=head_rows, split=split, chunk=chunk, groups=groups, **choices)


VARIANTS = [of_size(*size) for size in SIZES] + [
    of_size(*size, **choices)
    for size in ((32, 1, 256), (16, 4, 64))
    for choices in ({"trigger": "start"}, {"trigger": "end"}, {"pdl": False})
]
# No cluster; an inbox over the keys; inboxes beside them; one, two and four warpgroups a tile of keys; keys loaded once
# for several CTAs, without and with peers that have other keys.
SHAPES = [
    of_size(*size)
    for size in ((32, 1, 256), (32, 8, 256), (16, 4, 64), (16, 2, 128), (8, 4, 64), (16, 1, 256, 3), (16, 4, 256, 2))
]
DEFAULT = SHAPES[0]
SMALL = [SHAPES[0], SHAPES[2]]
every_shape = pytest.mark.parametrize("make", SHAPES, ids=as_test_id)
small = pytest.mark.parametrize("make", SMALL, ids=as_test_id)


@ROUTES
@pytest.mark.parametrize("make", VARIANTS, ids=as_test_id)
def test_every_variant_on_edge_counts(make, push):
    checks.check_edge_counts(make, push)


@pytest.mark.parametrize("make", [*SMALL, of_size(16, 1, 256, 2)], ids=as_test_id)
@ROUTES
@pytest.mark.parametrize("dcp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [64, 96, 128])
def test_heads_and_ranks(heads, dcp, push, make):
    checks.check_heads_and_ranks(make, heads, dcp, push)


@pytest.mark.parametrize("batch", [1, 2, 5, 6, 8, 17, 40])
@small
def test_batches(batch, make):
    checks.check_batch(make, batch)


@every_shape
@pytest.mark.parametrize("width", [1, 3, 64, 200, 2048])
def test_widths(width, make):
    checks.check_width(make, width)


@every_shape
def test_all_keys_on_one_rank(make):
    checks.check_all_keys(make)


@small
@pytest.mark.parametrize("generations", [2, 3])
def test_generations_follow_the_use_counter(generations, make):
    checks.check_generations(make, generations)


@ROUTES
@pytest.mark.parametrize(("split", "chunk"), [(1, 256), (2, 128), (4, 64), (8, 256)])
def test_heads_and_groups_change_no_bit(split, chunk, push):
    variants = [of_size(head_rows, split, chunk) for head_rows in HEAD_ROWS]
    variants += [of_size(16, split, chunk, groups) for groups in (2, 3, 6) if split * groups <= MAX_CLUSTER]
    others = ({"trigger": "start"}, {"trigger": "end"}, {"pdl": False})
    checks.check_same_bits([*variants, *(of_size(16, split, chunk, **choices) for choices in others)], push)


@every_shape
def test_hundred_repeats_agree_bitwise(make):
    checks.check_repeats(make)


@every_shape
def test_push_and_local_partials_agree_bitwise(make):
    checks.check_routes_agree(make)


@every_shape
def test_row_order_changes_no_bit(make):
    checks.check_row_order(make)


@every_shape
def test_graph_replays_agree_with_eager(make):
    checks.check_graph_replays(make)


@every_shape
def test_extreme_values(make):
    checks.check_extreme_values(make)


@every_shape
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


@small
def test_page_stride_and_ten_million_rows(make):
    checks.check_ten_million_rows(make)


@every_shape
@NEEDLE_COUNTS
def test_needle_counts_every_key_once(count, make):
    checks.check_needle_count(make, count)


@every_shape
def test_a_missing_query_word_ends_in_a_record_and_no_push(make):
    checks.check_missing_query_word(make)


@every_shape
def test_nothing_is_pushed_after_an_abort(make):
    checks.check_abort_stops_pushes(make)


def test_verdict_finds_one_wrong_column_and_a_wrong_lse():
    """Negative control: the checks of this file can fail."""
    checks.check_verdict_can_fail(DEFAULT)
