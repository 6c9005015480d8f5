"""Fabric `shm`: D processes of one host, each rank's region a memory-mapped file in /dev/shm.

The file is reserved in full before it is mapped (a write past a full tmpfs would be a SIGBUS, not an error), mapped by
every rank, and unlinked as soon as all have it: a rank killed later leaves nothing behind. What one leaves that is
killed earlier is removed by others (`shared_files`).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from dcp_decode.control.plane import ControlPlane
from dcp_decode.fabric import shared_files
from dcp_decode.fabric.memory import SymmetricMemory, address_table, refuse_if_any
from dcp_decode.fabric.shared_files import SHARED_MEMORY


@dataclass(frozen=True)
class _Reservation:
    """What a rank tells the others about its file: where it is, or why there is none."""

    path: Path | None
    refusal: str = ""


class ShmFabric:
    """This process is one rank; `control` carries the file names and the order of map and unlink."""

    name = "shm"

    def __init__(self, control: ControlPlane, folder: Path = SHARED_MEMORY) -> None:
        self.control = control
        self.size = control.size
        self.local_ranks: tuple[int, ...] = (control.rank,)
        self.device = torch.device("cpu")
        self.folder = folder

    def allocate(self, nbytes: int) -> list[SymmetricMemory]:
        """Reserve, map and unlink one file a rank; refused on all ranks if one can't be reserved or mapped."""
        reservation = self._reserve(nbytes)
        try:
            reservations: list[_Reservation] = self.control.all_gather(reservation, "shared-memory files")
            refuse_if_any([peer.refusal for peer in reservations])
            regions, refusal = _map_all([peer.path for peer in reservations if peer.path is not None])
            refuse_if_any(self.control.all_gather(refusal, "shared-memory maps"))
        finally:
            if reservation.path is not None:
                shared_files.remove(reservation.path)
        return [SymmetricMemory(self.control.rank, regions, address_table(regions))]

    def close(self) -> None:
        """Nothing to give back: the files have no name, and the maps end with their last tensor."""

    def abandon(self) -> None:
        """As `close`."""

    def _reserve(self, nbytes: int) -> _Reservation:
        shared_files.remove_abandoned(self.folder)  # their memory may be what is missing
        try:
            path, descriptor = shared_files.create(self.folder)
        except OSError as error:
            return _Reservation(None, f"{error.filename or self.folder}: {error.strerror}")
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            needed = self.size * nbytes / 2**20
            room = os.statvfs(self.folder)
            free = room.f_bavail * room.f_frsize / 2**20
            return _Reservation(
                path,
                f"{self.folder} has {free:.1f} MiB free but the {self.size} ranks' mailboxes need {needed:.1f} MiB "
                f"({error.strerror}); enlarge it (docker: --shm-size) or lower mailbox.capacity",
            )
        return _Reservation(path)


def _map_all(paths: list[Path]) -> tuple[tuple[torch.Tensor, ...], str]:
    regions = []
    for peer, path in enumerate(paths):
        try:
            with open(path, "r+b") as file:
                # The tensor keeps the map alive through the buffer protocol.
                regions.append(torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8))
        except OSError as error:
            return (), f"rank {peer}'s shared memory {path} can't be mapped: {error.strerror}"
    return tuple(regions), ""
