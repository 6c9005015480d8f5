"""A small use of both routes, for compute-sanitizer: eight ranks, two rows, one of them empty on most ranks."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch
from stage_group import StageGroup, make_group_inputs

from dcp_decode.geometry import Geometry

faulthandler.dump_traceback_later(50, exit=True)
for push in (True, False):
    group = StageGroup(Geometry(capacity=2, topk=128), 2, push, poison=False)
    inputs = make_group_inputs(group.geometry, [[70, 0]] * 7 + [[33, 5]], seed=1, cache_rows=256)
    merged = group.step(inputs)
    group.check_as_new(1)
    assert not bool(torch.isnan(merged).any())
