"""Fabric `symm_mem`: D processes of one host, one GPU each; torch's symmetric memory.

The rendezvous needs a process group only for its store: a gloo group over the control plane's store. Two ranks on one
GPU are refused here, before torch would fail in a collective call ("detected allocations from overlapping devices").
"""

from __future__ import annotations

import os
import secrets
from datetime import timedelta

import torch
import torch.distributed

from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.fabric.memory import SymmetricMemory, address_table
from dcp_decode.fabric.multicast import SYMMETRIC_MEMORY, forbid_multicast

GROUP_SECONDS = 120


class SymmMemFabric:
    """This process is one rank, on `device`. Raises UnsupportedEnvironment on all ranks if one can't take part."""

    name = "symm_mem"

    def __init__(self, control: ControlPlane, device: torch.device) -> None:
        self.control = control
        self.size = control.size
        self.local_ranks: tuple[int, ...] = (control.rank,)
        self.device = device
        forbid_multicast(os.environ, SYMMETRIC_MEMORY)
        torch.cuda.set_device(device)
        refuse_shared_devices(control.all_gather(_identity(control, device), "devices of symmetric memory"))
        self._group: torch.distributed.ProcessGroup | None = None
        # Keys of its own: gloo would connect to the addresses that an earlier group of these ranks has left.
        name = control.broadcast(secrets.token_hex(8), "name of the group")
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.PrefixStore(f"symm_mem/{name}", control.torch_store()),
            rank=control.rank,
            world_size=control.size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
        self._group = torch.distributed.group.WORLD

    def allocate(self, nbytes: int) -> list[SymmetricMemory]:
        """One region a rank; collective."""
        import torch.distributed._symmetric_memory as symmetric_memory

        self.control.barrier("symmetric allocation")
        assert self._group is not None
        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)
        handle = symmetric_memory.rendezvous(own, self._group.group_name)
        regions = tuple(
            own if peer == self.control.rank else handle.get_buffer(peer, (nbytes,), torch.uint8)
            for peer in range(self.size)
        )
        return [SymmetricMemory(self.control.rank, regions, address_table(regions), handle=handle)]

    def close(self) -> None:
        """End the group; collective. The memory ends with its last tensor, once all ranks have stopped using it."""
        torch.cuda.synchronize(self.device)
        self.control.barrier("symmetric memory is free")
        torch.distributed.destroy_process_group()

    def abandon(self) -> None:
        """Leave everything to the end of the process."""


def refuse_shared_devices(devices: list[tuple[str, str]]) -> None:
    """Raise UnsupportedEnvironment if two ranks are on one GPU, or not all on one host. devices: (host, GPU) a rank."""
    for rank, (host, gpu) in enumerate(devices):
        first = devices.index((host, gpu))
        if first != rank:
            raise UnsupportedEnvironment(
                f"fabric symm_mem needs a GPU a rank, but ranks {first} and {rank} share one ({gpu} of {host}); "
                "use fabric nvshmem, or loopback in one process"
            )
        if host != devices[0][0]:
            raise UnsupportedEnvironment(
                f"fabric symm_mem runs on one host, but rank 0 is on {devices[0][0]} and rank {rank} on {host}"
            )


def _identity(control: ControlPlane, device: torch.device) -> tuple[str, str]:
    return control.peers[control.rank].hostname, str(torch.cuda.get_device_properties(device).uuid)
