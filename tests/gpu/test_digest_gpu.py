"""Digests of merged rows made on the GPU, against hashlib."""

from __future__ import annotations

import pytest
import torch

from dcp_decode.digest import DIGEST_BYTES, rows_digest
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.launch import run_digest

pytestmark = pytest.mark.gpu
LAYERS, RANKS, ROWS = 3, 2, 7


@pytest.mark.parametrize("heads", [16, 96, 128])
@pytest.mark.parametrize("real", [0, 1, 2, 5, ROWS])
def test_digests_are_those_of_the_real_rows(heads, real):
    from dcp_decode.kernels.configs import DigestConfig
    from dcp_decode.kernels.digest import compile_digest

    geometry = Geometry(heads=heads, padded_heads=heads, capacity=ROWS)
    generator = torch.Generator(device="cuda").manual_seed(heads + real)
    shape = (LAYERS, RANKS, ROWS, geometry.owner_heads, 1024)
    merged = torch.randint(256, shape, dtype=torch.uint8, device="cuda", generator=generator).view(torch.bfloat16)
    digests = torch.full((LAYERS, RANKS, DIGEST_BYTES), 0x55, dtype=torch.uint8, device="cuda")
    rows = torch.tensor(real, device="cuda")
    kernel = compile_digest(DigestConfig(geometry, ROWS))
    found = []
    for _ in range(3):
        run_digest(kernel, merged, rows, digests, torch.cuda.current_stream().cuda_stream)
        found.append(digests.cpu())
        digests.zero_()
    assert all(torch.equal(one, found[0]) for one in found)
    for layer in range(LAYERS):
        for rank in range(RANKS):
            assert bytes(found[0][layer, rank]) == rows_digest(merged[layer, rank, :real].cpu()), (layer, rank)
