"""Which batches of a run launch their chain as one kernel: chosen once, alike on all ranks, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.aot import architecture_of
from dcp_decode.kernels.chain_config import ChainRefusal, ChainRefusalReason, fused_for


@dataclass(frozen=True)
class FusedBatches:
    """batches: those B whose stages from the query push to the merge are one launch. note: why, in one line."""

    batches: frozenset[int]
    note: str


def agree_on_fused(
    choice: str,
    batches: Iterable[int],
    geometry: Geometry,
    push: bool,
    own_device: bool,
    device: torch.device,
    control: ControlPlane,
) -> FusedBatches:
    """Collective, once a run: a batch is fused if every rank can.

    choice: `parallel.chain`. own_device: whether no other rank launches on this rank's device. Raises
    UnsupportedEnvironment, alike on all ranks, where "fused" is asked for and no batch can be.
    """
    if choice == "staged":
        return FusedBatches(frozenset(), "every chain is staged, as parallel.chain says")
    architecture = architecture_of(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    refusals = {}
    for batch in sorted(batches):
        refusal = fused_for(geometry, batch, architecture, own_device, processors)
        if not push:
            refusal = ChainRefusal(ChainRefusalReason.ROUTE, "route local")
        refusals[batch] = "" if refusal is None else str(refusal)
    return agreed(choice, control.all_gather(refusals, "batches of one launch"))


def agreed(choice: str, everyone: list[dict[int, str]]) -> FusedBatches:
    """What follows from all ranks' refusals by batch, "" where there is none; see `agree_on_fused`."""
    refused = {
        batch: f"rank {rank}: {refusal}"
        for rank, refusals in reversed(list(enumerate(everyone)))
        for batch, refusal in refusals.items()
        if refusal
    }
    fused = sorted(everyone[0].keys() - refused.keys())
    if choice == "fused" and not fused:
        raise UnsupportedEnvironment(f"parallel.chain = 'fused': no batch can be, {refused[min(refused)]}")
    reasons = [f"B = {batch} is staged, {refused[batch]}" for batch in sorted(refused)]
    listed = ", ".join(map(str, fused)) or "none"
    return FusedBatches(frozenset(fused), "; ".join([f"chains of one launch: B = {listed}", *reasons]))
