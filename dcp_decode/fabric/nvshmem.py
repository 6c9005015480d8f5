"""Fabric `nvshmem`: D processes on GPUs of one NVLink domain, or all on one GPU; NVSHMEM's symmetric heap.

    rank 0's unique id --control plane--> init on all ranks --> heap allocation (collective) --> peer pointers

Only the heap and its peer pointers are used: kernels load and store through an int64 table of them. NVSHMEM starts and
ends with the fabric, so a process has one open at a time; all calls are collective and every rank makes them in the
same order, each behind a control-plane barrier that names a missing rank before NVSHMEM could hang on it.

Seen on H200s: 8 processes on one GPU, one on each of two; start 1.0 s, peer writes correct, clean end. NVSHMEM 3.4.5
keeps about 1 MiB of device memory a start and process, with or without regions (30 starts of two processes: 60 MiB);
regions themselves come and go without a trace.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from dcp_decode.control.plane import ControlPlane
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.fabric.memory import SymmetricMemory, address_table, refuse_if_any
from dcp_decode.fabric.multicast import NVSHMEM, forbid_multicast


class NvshmemFabric:
    """This process is one rank, on `device`. Raises UnsupportedEnvironment on all ranks if one can't take part."""

    name = "nvshmem"

    def __init__(self, control: ControlPlane, device: torch.device) -> None:
        self.control = control
        self.size = control.size
        self.local_ranks: tuple[int, ...] = (control.rank,)
        self.device = device
        self._tensors: list[torch.Tensor] = []
        torch.cuda.set_device(device)
        refusal = ""
        try:
            forbid_multicast(os.environ, NVSHMEM)
            self._nvshmem = _load()
            identity = self._nvshmem.get_unique_id(empty=control.rank != 0)
        except (ImportError, OSError, RuntimeError, UnsupportedEnvironment) as error:
            refusal = str(error)
        refuse_if_any(control.all_gather(refusal, "NVSHMEM load"))
        self._start(identity)

    def _start(self, identity: Any) -> None:
        from cuda.core import Device

        words = _identity_bytes(identity)
        words[:] = np.frombuffer(self.control.broadcast(words.tobytes(), "NVSHMEM unique id"), dtype=np.uint8)
        device = Device(self.device.index)
        device.set_current()
        refusal = ""
        try:
            self._nvshmem.init(
                device=device,
                uid=identity,
                rank=self.control.rank,
                nranks=self.size,
                initializer_method="uid",
            )
        except Exception as error:  # nvshmem4py raises classes of its own
            refusal = f"NVSHMEM does not start: {error}"
        refuse_if_any(self.control.all_gather(refusal, "NVSHMEM start"))

    def allocate(self, nbytes: int) -> list[SymmetricMemory]:
        """One region a rank from the symmetric heap; refused, naming the rank, where a peer has no address."""
        self.control.barrier("symmetric allocation")
        refusal, regions = "", []
        try:
            # Freed by `close` alone: a tensor that dies early must not start a collective by itself.
            own = self._nvshmem.tensor((nbytes,), dtype=torch.uint8, except_on_del=False)
            self._tensors.append(own)
            for peer in range(self.size):
                regions.append(own if peer == self.control.rank else self._peer(own, peer))
        except Exception as error:
            refusal = str(error)
        refuse_if_any(self.control.all_gather(refusal, "symmetric memory"))
        return [SymmetricMemory(self.control.rank, tuple(regions), address_table(tuple(regions)), handle=self)]

    def _peer(self, own: torch.Tensor, peer: int) -> torch.Tensor:
        try:
            return self._nvshmem.get_peer_tensor(own, peer)
        except Exception as error:
            raise UnsupportedEnvironment(
                f"rank {peer}'s memory has no address on rank {self.control.rank} (not in one NVLink domain?): {error}"
            ) from None

    def close(self) -> None:
        """Free all regions in order and end NVSHMEM; collective, when no kernel uses them any more."""
        torch.cuda.synchronize(self.device)
        self.control.barrier("symmetric memory is free")
        for tensor in self._tensors:
            self._nvshmem.free_tensor(tensor)
        self._tensors.clear()
        self._nvshmem.finalize()

    def abandon(self) -> None:
        """Leave everything to the end of the process: a collective call would wait for ranks that are gone."""


def _load() -> Any:
    import nvshmem.core

    return nvshmem.core


def _identity_bytes(identity: Any) -> np.ndarray:
    """The unique id's own bytes, writable: uint8 [128]."""
    return np.asarray(identity._data).view(np.uint8).reshape(-1)
