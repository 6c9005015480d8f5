"""One rank that opens and closes fabric `nvshmem` again and again: torchrun ... fabric_cycles.py CYCLES RANK0.json.

Rank 0 leaves a list of what is in use after every cycle: bytes on the device, open files and threads of its process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from dcp_decode.control.torchrun import connect_torchrun
from dcp_decode.fabric.nvshmem import NvshmemFabric

REGION_BYTES = 1 << 20


def main(cycles: int, output: Path) -> None:
    control = connect_torchrun(os.environ, 60.0)
    device = torch.device("cuda", control.rank % torch.cuda.device_count())
    used = []
    for cycle in range(cycles):
        fabric = NvshmemFabric(control, device)
        memory = fabric.allocate(REGION_BYTES)[0]
        peer = (control.rank + 1) % control.size
        memory.regions[peer].fill_(cycle % 251)
        torch.cuda.synchronize(device)
        control.barrier("written")
        assert bool((memory.local == cycle % 251).all()), f"cycle {cycle}: a peer's write is missing"
        del memory
        fabric.close()
        control.barrier("closed")  # by all: the device's memory is theirs together
        free, total = torch.cuda.mem_get_info(device)
        used.append(
            {
                "device_bytes": total - free,
                "files": len(list(Path("/proc/self/fd").iterdir())),
                "threads": len(list(Path("/proc/self/task").iterdir())),
            }
        )
        if control.rank == 0:
            output.write_text(json.dumps(used))
        control.barrier("measured")
    control.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
