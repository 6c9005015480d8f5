"""One rank that opens and closes fabric `nvshmem` again and again: torchrun ... fabric_cycles.py CYCLES RANK0.json.

First without regions, so that NVSHMEM alone starts and ends, then with one that a peer writes to. Rank 0 leaves, by
"bare" and "used", a list of what is in use after every cycle: bytes on the device, open files and threads of its
process. The device must be the ranks' alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from dcp_decode.control.plane import ControlPlane
from dcp_decode.control.torchrun import connect_torchrun
from dcp_decode.fabric.nvshmem import NvshmemFabric

REGION_BYTES = 1 << 20


def use_region(fabric: NvshmemFabric, control: ControlPlane, value: int) -> None:
    """Every rank writes to its neighbour's region."""
    memory = fabric.allocate(REGION_BYTES)[0]
    memory.regions[(control.rank + 1) % control.size].fill_(value)
    torch.cuda.synchronize(fabric.device)
    control.barrier("written")
    assert bool((memory.local == value).all()), f"value {value}: a peer's write is missing"


def in_use(device: torch.device) -> dict[str, int]:
    free, total = torch.cuda.mem_get_info(device)
    return {
        "device_bytes": total - free,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def main(cycles: int, output: Path) -> None:
    control = connect_torchrun(os.environ, 60.0)
    device = torch.device("cuda", control.rank % torch.cuda.device_count())
    found: dict[str, list[dict[str, int]]] = {"bare": [], "used": []}
    for name, used in found.items():
        for cycle in range(cycles):
            fabric = NvshmemFabric(control, device)
            if name == "used":
                use_region(fabric, control, cycle % 251)
            fabric.close()
            control.barrier("closed")  # by all: the device's memory is theirs together
            used.append(in_use(device))
            control.barrier("measured")
    if control.rank == 0:
        output.write_text(json.dumps(found))
    control.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
