"""SparseDcpDecode on a GPU: against the FP64 oracle and the twin with derived bounds, and bitwise within its family."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from sparse_cases import EDGE_COUNTS, ROUTES, SparseCases, check_step  # noqa: E402
from sparse_rank import SparseRank, make_inputs  # noqa: E402

from dcp_decode.geometry import Geometry  # noqa: E402
from dcp_decode.kernels.aot import architecture_of  # noqa: E402
from dcp_decode.kernels.sparse_layout import decode_config, sparse_config  # noqa: E402

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
PROBABILITIES_128 = [
    partial(sparse_config, exchange="probabilities", tiles=1, chunk=128, **variant)
    for variant in ({"groups": 2}, {"groups": 1}, {"groups": 2, "trigger": "end"})
]


class TestPartials(SparseCases):
    variants = SEED
    shapes = tuple(SEED[n] for n in (0, 2, 8, 11))  # one for each number of tiles, and a bulk exchange
    small = SEED[:1]
    families = (SEED,)


class TestProbabilities(SparseCases):
    variants = PROBABILITIES
    shapes = tuple(PROBABILITIES[n] for n in (0, 4, 6, 7))  # one for each number of tiles, and of head groups
    small = (PROBABILITIES[0], PROBABILITIES[7])
    families = (PROBABILITIES,)


class TestProbabilitiesOfTwoBlocks(SparseCases):
    variants = PROBABILITIES_128
    shapes = PROBABILITIES_128[:2]
    small = PROBABILITIES_128[:1]
    families = (PROBABILITIES_128,)


@ROUTES
@pytest.mark.parametrize(
    ("first", "second"),
    [(SEED[0], PROBABILITIES[0]), (PROBABILITIES[7], PROBABILITIES_128[0])],
    ids=["partials", "two blocks"],
)
def test_families_agree_where_their_orders_do(first, second, push):
    """The same rows up to 256 keys, where chunks, and so the order of the sums, are the same; other rows beyond."""
    geometry = Geometry(capacity=len(EDGE_COUNTS))
    ranks = SparseRank(geometry, 1)
    inputs = make_inputs(geometry, EDGE_COUNTS, seed=23)
    configs = [make(geometry, len(EDGE_COUNTS), push) for make in (first, second)]
    one = ranks.step(configs[0], inputs)
    ranks.rearm_values()
    other = ranks.step(configs[1], inputs)
    alike = inputs.valid <= 256
    assert torch.equal(one.out[alike].view(torch.int16), other.out[alike].view(torch.int16))
    assert not torch.equal(one.out[~alike].view(torch.int16), other.out[~alike].view(torch.int16))
    same_lse = alike if configs[0].chunk != configs[1].chunk else inputs.valid >= 0
    assert torch.equal(one.lse[same_lse].view(torch.int32), other.lse[same_lse].view(torch.int32))


@pytest.mark.parametrize("batch", [1, 2, 5, 6, 8, 9, 12, 17, 20, 23, 40])
@pytest.mark.parametrize("most_keys", [256, 301, 2048])
def test_default_layout_of_every_bucket(batch, most_keys):
    """What `sparse_layout` chooses on this GPU for about as many keys."""
    architecture = architecture_of(torch.device("cuda"))
    counts = [(37 * row + most_keys) % (most_keys + 1) for row in range(batch)]

    def chosen(geometry, batch, push):
        return decode_config(geometry, batch, push, architecture, most_keys)

    check_step(chosen, Geometry(capacity=40), counts, True, seed=batch, rank=7)
