"""Where the ranks run and over what: device and fabric of a run, chosen once, alike on all ranks, with the reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.fabric.loopback import LoopbackFabric
from dcp_decode.fabric.memory import Fabric
from dcp_decode.fabric.shm import ShmFabric
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES, architecture_name

LEAST_CAPABILITY = (9, 0)  # the sparse kernel needs clusters and bulk copies


@dataclass(frozen=True)
class Placement:
    """fabric: resolved name. device: this rank's. shared: somewhere in the group, processes share a GPU.

    shared is one answer for all ranks, since they must all go in lockstep where only some have a GPU to themselves.
    """

    fabric: str
    device: torch.device
    shared: bool
    reason: str


@dataclass(frozen=True)
class _Offer:
    """What a rank could use: its GPU (None, and why), and which fabrics are installed."""

    refusal: str
    host: str
    index: int
    gpu: str
    nvshmem: bool


def place(fabric: str, device: str, control: ControlPlane, compiles: bool = True) -> Placement:
    """Resolve parallel.fabric and parallel.device; collective. Raises UnsupportedEnvironment, alike on all ranks.

    compiles: kernels are compiled in the run, not built ahead of time.
    """
    if device == "cpu" or fabric == "shm":
        return _on_cpu(fabric, control, "parallel.device is cpu")
    offers = control.all_gather(_offer(control, compiles), "devices")
    refusals = [f"rank {rank}: {offer.refusal}" for rank, offer in enumerate(offers) if offer.refusal]
    if refusals:
        if device == "auto" and fabric not in ("nvshmem", "symm_mem"):
            return _on_cpu(fabric, control, refusals[0])
        raise UnsupportedEnvironment(f"parallel.device = {device!r}: {refusals[0]}")
    return _on_gpu(fabric, offers, control.rank)


def processes_to_start(fabric: str, device: str, dcp: int) -> int:
    """Processes of a run that no other launcher starts: one a rank, or one for all of them (fabric loopback).

    With the fabric left open, ranks that would have to share GPUs run in one process: there a step can be one graph.
    """
    # Counted through the driver's management library: a process that has used CUDA itself can't fork ranks.
    gpus = torch.cuda.device_count() if fabric == "auto" and device != "cpu" else 0
    return processes_beside(gpus, fabric, device, dcp)


def processes_beside(gpus: int, fabric: str, device: str, dcp: int) -> int:
    """`processes_to_start` on a host with so many GPUs, whether the kernels can use them or not."""
    if fabric == "loopback" or (fabric == "auto" and device != "cpu" and 0 < gpus < dcp):
        return 1
    return dcp


def open_fabric(placement: Placement, size: int, control: ControlPlane) -> Fabric:
    """The fabric of a placement over `size` ranks; collective."""
    if placement.fabric == "loopback":
        return LoopbackFabric(size, placement.device)
    if placement.fabric == "shm":
        return ShmFabric(control)
    # Imported here: a CPU-only machine has none of their packages.
    if placement.fabric == "nvshmem":
        from dcp_decode.fabric.nvshmem import NvshmemFabric

        return NvshmemFabric(control, placement.device)
    from dcp_decode.fabric.symm_mem import SymmMemFabric

    return SymmMemFabric(control, placement.device)


def _on_cpu(fabric: str, control: ControlPlane, reason: str) -> Placement:
    if fabric == "auto":
        fabric = "loopback" if control.size == 1 else "shm"
    return Placement(fabric, torch.device("cpu"), False, reason)


def _on_gpu(fabric: str, offers: Sequence[_Offer], rank: int) -> Placement:
    one_each = len({(offer.host, offer.gpu) for offer in offers}) == len(offers)
    reason = f"parallel.fabric is {fabric}"
    if fabric == "auto":
        if len(offers) == 1:
            fabric, reason = "loopback", "one process runs all ranks"
        elif all(offer.nvshmem for offer in offers):
            fabric, reason = "nvshmem", "a GPU a rank" if one_each else "ranks share a GPU"
        elif one_each:
            fabric, reason = "symm_mem", "a GPU a rank, and no nvshmem4py"
        else:
            raise UnsupportedEnvironment("ranks share a GPU, which needs fabric nvshmem: nvshmem4py is not installed")
    return Placement(fabric, torch.device("cuda", offers[rank].index), not one_each, reason)


def _offer(control: ControlPlane, compiles: bool) -> _Offer:
    host = control.peers[control.rank].hostname
    refusal = _refusal(compiles)
    if refusal:
        return _Offer(refusal, host, -1, "", False)
    neighbours = [rank for rank, peer in enumerate(control.peers) if peer.hostname == host]
    index = neighbours.index(control.rank) % torch.cuda.device_count()
    gpu = str(torch.cuda.get_device_properties(index).uuid)
    return _Offer("", host, index, gpu, importlib.util.find_spec("nvshmem") is not None)


def _refusal(compiles: bool) -> str:
    """Why this process can't use a GPU, or nothing."""
    if not torch.cuda.is_available():
        return "no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, and the kernels need 9.0 or later"
    name = architecture_name(capability)
    if name not in ARCHITECTURES:
        return f"GPU architecture {name}, and the kernels are for {', '.join(ARCHITECTURES)}"
    if compiles and importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed, and no build of the kernels is given (parallel.kernels)"
    return ""
