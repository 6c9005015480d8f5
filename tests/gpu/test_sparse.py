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


@pytest.mark.parametrize("batch", [1, 2, 5, 6, 8, 9, 12, 17, 20, 23, 40])
@pytest.mark.parametrize("most_keys", [256, 2048])
def test_default_layout_of_every_bucket(batch, most_keys):
    """What `sparse_layout` chooses on this GPU for about as many keys."""
    architecture = architecture_of(torch.device("cuda"))
    counts = [(37 * row + most_keys) % (most_keys + 1) for row in range(batch)]

    def chosen(geometry, batch, push):
        return decode_config(geometry, batch, push, architecture, most_keys)

    check_step(chosen, Geometry(capacity=40), counts, True, seed=batch, rank=7)
