"""Small uses of the kernels for compute-sanitizer, two rows, one empty: `sanitize_case.py [CASE]`.

all: both routes, the fused chain, two blocks of keys in a round, and the warpgroup decode but for the other case.
multicast: the warpgroup decode where head groups copy a later chunk of keys for each other, an order between CTAs that
racecheck does not know (`sanitizers`).
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch
from chain_group import ChainGroup, PushedWords
from sparse_rank import SparseRank, make_inputs
from stage_group import StageGroup, make_group_inputs

from dcp_decode.digest import DIGEST_BYTES, rows_digest
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.configs import DigestConfig
from dcp_decode.kernels.digest import compile_digest
from dcp_decode.kernels.launch import run_digest
from dcp_decode.kernels.sparse_layout import DecodeConfig, sparse_config
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig

GEOMETRY = Geometry(capacity=2, topk=512)
# Two blocks of keys in the one round of a row: half of the second, and all of it.
TWO_BLOCKS = sparse_config(GEOMETRY, 2, tiles=1, exchange="probabilities", groups=2, chunk=128)
Size = tuple[int, int, int, int]  # heads of a CTA, CTAs of a row's keys, keys of a chunk, head groups
# No cluster: four, two and one warpgroup a tile of keys, several chunks; an inbox over the keys; one beside them with
# partial scores; keys copied once for three CTAs, and for two beside peers with other keys.
SIZES: tuple[tuple[Size, int], ...] = (
    ((16, 1, 64, 1), 300),
    ((16, 1, 128, 1), 300),
    ((32, 1, 256, 1), 300),
    ((32, 2, 256, 1), 300),
    ((16, 4, 64, 1), 300),
    ((16, 1, 256, 3), 250),
    ((16, 2, 64, 2), 120),
)
MULTICAST: tuple[tuple[Size, int], ...] = (((16, 2, 64, 2), 133),)


def run_stages() -> None:
    """Both routes of the stages, then the fused chain."""
    for push in (True, False):
        group = StageGroup(Geometry(capacity=2, topk=128), 2, push, poison=False)
        inputs = make_group_inputs(group.geometry, [[70, 0]] * 7 + [[33, 5]], seed=1, cache_rows=256)
        merged = group.step(inputs)
        group.check_as_new(1)
        assert not bool(torch.isnan(merged).any())
        check_digests(merged)
    # The sanitizer runs kernels one after the other, so one rank's peers have pushed before it starts.
    chain = ChainGroup(Geometry(capacity=2, topk=128), 2, poison=False)
    pushed = PushedWords(StageGroup(chain.geometry, 2, poison=False), inputs)
    pushed.put(chain.mailboxes[3], [rank for rank in range(8) if rank != 3])
    torch.cuda.synchronize()
    chain.launch(3, inputs)
    torch.cuda.synchronize()
    assert torch.equal(chain.merged[3].view(torch.int16), pushed.merged[3].view(torch.int16))


def check_digests(merged: torch.Tensor) -> None:
    """merged: bf16 [ranks, B, H, 512]; of each rank's rows but the last."""
    ranks, rows, heads, _ = merged.shape
    digests = torch.empty(ranks, DIGEST_BYTES, dtype=torch.uint8, device="cuda")
    kernel = compile_digest(DigestConfig(Geometry(heads=heads * ranks, padded_heads=heads * ranks, capacity=2), rows))
    run_digest(kernel, merged, torch.tensor(rows - 1, device="cuda"), digests, torch.cuda.current_stream().cuda_stream)
    assert [bytes(one) for one in digests.cpu()] == [rows_digest(one[: rows - 1].cpu()) for one in merged]


def run_decodes(decodes: list[tuple[DecodeConfig, int]]) -> None:
    """One use of each, of a row with so many keys and an empty one."""
    for config, keys in decodes:
        ranks = SparseRank(GEOMETRY, 3)
        inputs = make_inputs(GEOMETRY, [keys, 0], seed=2, cache_rows=512)
        ranks.put_query(inputs.query)
        torch.cuda.synchronize()
        ranks.launch(config, inputs)
        torch.cuda.synchronize()
        outputs = ranks.take_partials(2)
        assert ranks.query_is_armed()
        assert not bool(outputs.lse.isnan().any() | outputs.out[0].isnan().any())


def main() -> None:
    case = sys.argv[1] if len(sys.argv) > 1 else "all"
    faulthandler.dump_traceback_later(50, exit=True)
    has_wgmma = torch.cuda.get_device_capability()[0] == 9
    sizes = MULTICAST
    if case == "all":
        run_stages()
        run_decodes([(TWO_BLOCKS, 300), (TWO_BLOCKS, 500)])
        sizes = SIZES
    if has_wgmma:
        run_decodes([(WarpgroupConfig(GEOMETRY, 2, True, *size), keys) for size, keys in sizes])


if __name__ == "__main__":
    main()
