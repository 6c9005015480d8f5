"""The static-shape workload of a step must have exactly the bits of the per-row functions."""

from __future__ import annotations

import pytest
import torch

from dcp_decode import cache
from dcp_decode.batch_workload import BatchRows, BatchWorkload
from dcp_decode.geometry import Geometry
from dcp_decode.workload import Purpose, Workload, hashed_word, hashed_words

GEOMETRY = Geometry(heads=16, dcp=4, capacity=8, padded_heads=16, topk=32, k_scale=0.03)
LAYERS = 3
ROWS = [(0, 3, 0), (5, 130, 2), (5, 131, 2), (1_000_000, 1_048_575, 77), (2, 2**31 - 2, 4)]


def batch_rows(rows: list[tuple[int, int, int]]) -> BatchRows:
    request, position, salt = (torch.tensor(column) for column in zip(*rows, strict=True))
    return BatchRows(request, position, salt)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(2**63 - 5, GEOMETRY)


def test_streams_have_the_bits_of_the_host_hash():
    names = torch.tensor([0, 1, 255, 2**40])
    state = Workload(9, GEOMETRY).purpose_states(torch.device("cpu"))[Purpose.NOISE - 1]
    made = hashed_words(state, names, names + 3)
    for name, word in zip(names.tolist(), made.tolist(), strict=True):
        assert word % 2**64 == hashed_word(9, Purpose.NOISE, name, name + 3)


def test_keys_queries_and_scores_equal_those_of_single_rows(workload):
    batch = BatchWorkload(workload, LAYERS, batch_rows(ROWS))
    heads = range(4, 12)
    keys, queries = batch.keys(), batch.queries(heads)
    candidates = torch.stack([torch.arange(40) * 3 + max(0, row[1] - 100) for row in ROWS])
    salts = candidates % 3
    for layer in range(LAYERS):
        scores = batch.index_scores(slice(layer, layer + 1), candidates, salts)[0]
        for index, (request, position, salt) in enumerate(ROWS):
            own = (torch.tensor([position]), torch.tensor([salt]))
            assert torch.equal(keys[layer, index], workload.key_bytes(layer, request, *own)[0])
            single = workload.queries(layer, request, *own, heads)[0]
            assert torch.equal(queries[layer, index].view(torch.int16), single.view(torch.int16))
            row = (layer, request, position, salt, candidates[index], salts[index])
            assert torch.equal(scores[index], workload.index_scores(*row))


def test_layers_requests_positions_and_salts_all_count(workload):
    """A stream that forgot one of its names would make two of these rows alike."""
    base = (5, 130, 2)
    others = [(6, 130, 2), (5, 131, 2), (5, 130, 3)]
    batch = BatchWorkload(workload, 2, batch_rows([base, *others]))
    candidates, salts = torch.arange(64), torch.zeros(4, 64, dtype=torch.int64)
    for made in (batch.keys(), batch.queries(range(16))):
        assert not torch.equal(made[0], made[1])
        for index in range(1, 4):
            assert not torch.equal(made[0, 0], made[0, index])
    scores = batch.index_scores(slice(1), candidates, salts)[0]
    for index in range(1, 4):
        assert not torch.equal(scores[0], scores[index])


def test_padding_rows_change_no_other_row(workload):
    padded = BatchWorkload(workload, LAYERS, batch_rows([*ROWS, (0, -1, 0)]))
    plain = BatchWorkload(workload, LAYERS, batch_rows(ROWS))
    assert torch.equal(padded.keys()[:, : len(ROWS)], plain.keys())
    candidates = cache.position(torch.arange(64), 1, GEOMETRY)
    salts = torch.zeros(len(ROWS) + 1, 64, dtype=torch.int64)
    layer = slice(1, 2)
    got = padded.index_scores(layer, candidates, salts)[:, : len(ROWS)]
    assert torch.equal(got, plain.index_scores(layer, candidates, salts[: len(ROWS)]))
