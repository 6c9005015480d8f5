"""Small uses of both routes, the fused chain and the warpgroup decode, for compute-sanitizer: two rows, one empty."""

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

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig

faulthandler.dump_traceback_later(50, exit=True)
for push in (True, False):
    group = StageGroup(Geometry(capacity=2, topk=128), 2, push, poison=False)
    inputs = make_group_inputs(group.geometry, [[70, 0]] * 7 + [[33, 5]], seed=1, cache_rows=256)
    merged = group.step(inputs)
    group.check_as_new(1)
    assert not bool(torch.isnan(merged).any())

# The sanitizer runs kernels one after the other, so one rank's peers have pushed before it starts.
chain = ChainGroup(Geometry(capacity=2, topk=128), 2, poison=False)
pushed = PushedWords(StageGroup(chain.geometry, 2, poison=False), inputs)
pushed.put(chain.mailboxes[3], [rank for rank in range(8) if rank != 3])
torch.cuda.synchronize()
chain.launch(3, inputs)
torch.cuda.synchronize()
assert torch.equal(chain.merged[3].view(torch.int16), pushed.merged[3].view(torch.int16))

# No cluster, an inbox over the keys, an inbox of its own with partial scores, keys loaded for two; one chunk and two.
if torch.cuda.get_device_capability()[0] == 9:
    geometry = Geometry(capacity=2, topk=320)
    for size in ((32, 1, 256, 1), (32, 2, 256, 1), (16, 4, 64, 1), (16, 2, 64, 2)):
        ranks = SparseRank(geometry, 3)
        attended = make_inputs(geometry, [300, 0], seed=2, cache_rows=512)
        ranks.put_query(attended.query)
        torch.cuda.synchronize()
        ranks.launch(WarpgroupConfig(geometry, 2, True, *size), attended)
        torch.cuda.synchronize()
        outputs = ranks.take_partials(2)
        assert ranks.query_is_armed()
        assert not bool(outputs.lse.isnan().any() | outputs.out[0].isnan().any())
