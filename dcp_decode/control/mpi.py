"""Control plane `mpi`: mpi4py, the only module that imports it.

Collectives of MPI block without saying for whom, so an all-gather is D - 1 small non-blocking messages each way,
polled one by one: messages of one source arrive in order, which makes the sequence number implicit.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed

from dcp_decode.control.plane import PolledControlPlane, host_torch_store
from dcp_decode.errors import UnsupportedEnvironment

TAG = 1


class MpiControlPlane(PolledControlPlane):
    """The ranks of MPI's world. Raises UnsupportedEnvironment if mpi4py or its MPI library is missing."""

    name = "mpi"

    def __init__(self, deadline_seconds: float) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise UnsupportedEnvironment(
                f"started by MPI, but mpi4py can't be used ({reason}); install extra [mpi]"
            ) from None
        self._mpi = MPI
        self._communicator = MPI.COMM_WORLD.Dup()
        # Errors come back as exceptions instead of ending all ranks inside the library.
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        super().__init__(self._communicator.Get_rank(), self._communicator.Get_size(), deadline_seconds)
        self._own: dict[int, bytes] = {}
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._store: torch.distributed.Store | None = None
        self.meet()

    def torch_store(self) -> torch.distributed.Store:
        if self._store is None:
            self._store = host_torch_store(self, self.deadline_seconds)
        return self._store

    def close(self, failure: str | None = None) -> None:
        """Nothing to say: peers see the end of the process, and MPI ends the group."""

    def _post(self, sequence: int, payload: bytes) -> None:
        self._own = {sequence: payload}
        for rank in range(self.size):
            if rank != self.rank:
                request = self._communicator.Isend([payload, self._mpi.BYTE], dest=rank, tag=TAG)
                self._sends.append((request, payload))

    def _arrivals(self, sequence: int, missing: Collection[int]) -> dict[int, bytes]:
        arrived: dict[int, bytes] = {}
        for rank in missing:
            if rank == self.rank:
                arrived[rank] = self._own[sequence]
                continue
            status = self._mpi.Status()
            message = self._communicator.Improbe(source=rank, tag=TAG, status=status)
            if message is not None:
                buffer = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv([buffer, self._mpi.BYTE])
                arrived[rank] = bytes(buffer)
        return arrived

    def _retire(self, sequence: int) -> None:
        # The payload must outlive its send; sends of passed sequences are complete, the newest may not be.
        self._sends = [(request, payload) for request, payload in self._sends if not request.Test()]
