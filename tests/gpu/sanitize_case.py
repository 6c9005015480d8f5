"""A small use of both routes and a fused one, for compute-sanitizer: eight ranks, two rows, one empty on most ranks."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch
from chain_group import ChainGroup, PushedWords
from stage_group import StageGroup, make_group_inputs

from dcp_decode.geometry import Geometry

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
