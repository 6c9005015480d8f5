"""Control plane `torchrun`: the rendezvous of torch.distributed from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

Only the store is used; no process group is made here (a GPU fabric that needs one builds it on `torch_store`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed

from dcp_decode.control.store import StoreControlPlane
from dcp_decode.errors import WaitFailed


def connect_torchrun(environment: Mapping[str, str], deadline_seconds: float) -> StoreControlPlane:
    """The control plane of this torchrun worker. Raises WaitFailed if the store can't be reached."""
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    agent_hosts = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    where = f"torchrun's store at {address}:{port}"

    def open_store() -> torch.distributed.Store:
        try:
            store = torch.distributed.TCPStore(
                address,
                port,
                None,
                is_master=rank == 0 and not agent_hosts,
                timeout=timedelta(seconds=deadline_seconds),
                wait_for_workers=False,
            )
        except torch.distributed.DistError as error:
            raise WaitFailed(f"rank {rank} can't reach {where}: {str(error).splitlines()[0]}") from None
        # A restarted group must not see the keys of the attempt before it.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return torch.distributed.PrefixStore(f"dcp_decode/{attempt}", store)

    return StoreControlPlane("torchrun", where, open_store, rank, size, deadline_seconds)
