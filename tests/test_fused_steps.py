"""The fused chain in a run: who agrees to it, and that a step takes it exactly where it may."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from test_device_steps import GEOMETRY, LAYERS, PAGES, ROWS_A_REQUEST, make_service, make_stages

from dcp_decode.config import load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.cpu.stages import CpuStages
from dcp_decode.device_rank import DeviceGroup
from dcp_decode.device_steps import DeviceSteps
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.chain_config import ChainRefusalReason, fused_for, step_kernels
from dcp_decode.kernels.fusing import agreed
from dcp_decode.kernels.sparse_layout import decode_config
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES
from dcp_decode.mailbox import Stage
from dcp_decode.step import Batch, BeforeStage, timed_seconds
from dcp_decode.workload import Workload

ALONE = replace(GEOMETRY, dcp=1)


class OneLaunch(CpuStages):
    """Stages 1 to 3 of a rank that has no peers, as one call."""

    launches = 0

    def fuses(self, batch: int) -> bool:
        return batch == ROWS_A_REQUEST

    def fused_chain(self, query, cache, rows, valid) -> torch.Tensor:
        self.launches += 1
        self.query_push(query)
        self.sparse_decode_push(cache, rows, valid)
        return self.merge(len(query), after=Stage.SPARSE)


def merged_rows(fused: bool, before_stage: BeforeStage | None = None) -> tuple[list[torch.Tensor], int, list[int]]:
    """Merged rows of all steps of a service, launches of the chain, and each step's rows, padding included."""
    stages: list[CpuStages] = make_stages(ALONE)
    if fused:
        stages = [OneLaunch(one.mailbox, 5.0) for one in stages]
    group = DeviceGroup(ALONE, Workload(11, ALONE), LAYERS, PAGES, stages)
    steps = DeviceSteps(group, "push", ROWS_A_REQUEST, SoloControlPlane(), False, 5.0, before_stage=before_stage)
    service = make_service(ALONE)
    found, sizes = [], []
    while (plan := service.next_step()) is not None:
        for index in plan.prefills:
            steps.prefill(service.request(index))
        batch = Batch(plan.rows, {row.request: service.request(row.request) for row in plan.rows})
        found += [result.merged.clone() for result in steps.run(plan.index, batch, verified=True).results]
        assert steps._newest is not None
        sizes.append(steps._newest.shape.rows)
        service.complete(plan)
    return found, getattr(stages[0], "launches", 0), sizes


def test_steps_of_agreed_batches_are_one_launch_with_the_bits_of_the_stages():
    staged, none, sizes = merged_rows(fused=False)
    found, launches, _ = merged_rows(fused=True)
    assert none == 0
    assert launches == LAYERS * sizes.count(ROWS_A_REQUEST) > 0
    # Fused and staged steps follow each other, on the same mailbox.
    assert any(one != other for one, other in pairwise(sizes))
    assert [rows.view(torch.int16).tolist() for rows in found] == [rows.view(torch.int16).tolist() for rows in staged]


def test_a_chain_of_one_launch_is_timed_as_the_chain():
    assert timed_seconds({"select": 8.0, "fused_chain": 4.0}) == (0, 0, 0, 4)
    staged = {"query_push": 1.0, "sparse_decode_local": 2.0, "value_push": 4.0, "merge": 8.0}
    assert timed_seconds(staged) == (1, 2, 12, 15)


def test_who_looks_between_the_stages_finds_them():
    seen = []
    _, launches, _ = merged_rows(fused=True, before_stage=lambda run, name: seen.append(name))
    assert launches == 0
    assert {"query_push", "sparse_decode_push", "merge"} <= set(seen)


def test_a_batch_is_fused_only_if_every_rank_can():
    both = agreed("auto", [{2: "", 5: ""}, {2: "", 5: ""}])
    assert both.batches == {2, 5}
    some = agreed("fused", [{2: "", 5: ""}, {2: "", 5: "too few multiprocessors"}, {2: "", 5: "other"}])
    assert some.batches == {2}
    assert some.note == "chains of one launch: B = 2; B = 5 is staged, rank 1: too few multiprocessors"
    refused = [{2: "", 5: "x"}, {2: "y", 5: ""}]
    assert agreed("auto", refused).batches == frozenset()
    with pytest.raises(UnsupportedEnvironment, match=r"parallel.chain = 'fused': no batch can be, rank 1: y"):
        agreed("fused", refused)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_run_fuses_only_what_keeps_the_bits_of_its_stages(architecture):
    geometry = Geometry(capacity=40)
    for batch in (1, 5, 8, 40):
        refusal = fused_for(geometry, batch, architecture, own_device=True, multiprocessors=132)
        kernels = step_kernels(geometry, batch, True, architecture)
        assert ("chain" in kernels) == (refusal is None)
        assert "chain" not in step_kernels(geometry, batch, False, architecture)
        if refusal is None:
            assert kernels["chain"].sparse.family == decode_config(geometry, batch, True, architecture).family
        else:
            assert refusal.reason in (ChainRefusalReason.WAVE, ChainRefusalReason.FAMILY)
    shared = fused_for(geometry, 1, architecture, own_device=False, multiprocessors=132)
    assert shared is not None
    assert shared.reason is ChainRefusalReason.SHARED_DEVICE


@pytest.mark.parametrize("given", [{"parallel.route": "local"}, {"parallel.device": "cpu"}])
def test_a_config_that_can_never_fuse_is_refused(given):
    needed = {"parallel.chain": "fused", "parallel.device": "auto"}
    assert load_config(None, needed).parallel.chain == "fused"
    with pytest.raises(ConfigError, match=r"parallel\.chain = .*needs parallel\.route = push and a GPU"):
        load_config(None, needed | given)
