"""What one rank's process sees of its machine: GPUs, versions, libraries that load, shared memory, variables."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dcp_decode import environment
from dcp_decode.doctor.gpus import Gpu, HostGpus, observe_gpus
from dcp_decode.fabric.shm import SHARED_MEMORY
from dcp_decode.host_memory import memory_bytes

IMPORT_SECONDS = 60.0

# Loaded in a process of their own: a library that crashes or hangs there is a finding here.
IMPORTS = {
    "cutlass": "import cutlass, cutlass.cute; print('loads')",
    "nvshmem": "import nvshmem.core; print('loads, library', nvshmem.core.get_version().libnvshmem_version)",
    "mpi4py": "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print('loads,', MPI.Get_library_version().split(',')[0])",
}
# Variables that change what a run does; a difference between ranks is often the fault.
VARIABLES = ("CUDA_", "NVSHMEM_", "NCCL_", "TORCH_SYMM_MEM", "CUTE_DSL_", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Import:
    """Whether a package loads: what it says of itself, or why not."""

    works: bool
    answer: str


@dataclass(frozen=True)
class RankFacts:
    """The facts of one rank. cuda_torch: the CUDA version torch was built with. visible_gpus: uuids that torch sees.

    imports: None on all but the first rank of a host, which asks for all of them. memory_bytes: what this
    process may use. shared_memory_*: bytes of /dev/shm.
    """

    rank: int
    host: str
    process_id: int
    processor: str
    cores: int
    memory_bytes: int
    system: str
    versions: Mapping[str, str]
    cuda_torch: str | None
    visible_gpus: tuple[str, ...]
    gpus: HostGpus
    imports: Mapping[str, Import] | None
    mpirun: str | None
    shared_memory_bytes: int
    shared_memory_free_bytes: int
    variables: Mapping[str, str] = field(default_factory=dict)


def observe(rank: int, with_imports: bool) -> RankFacts:
    """The facts of this process; takes about 2 s with the imports."""
    room = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        process_id=os.getpid(),
        processor=environment.describe_device("cpu")["name"],
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=environment.versions(),
        cuda_torch=torch.version.cuda,
        visible_gpus=_visible_gpus(),
        gpus=_with_visible(observe_gpus()),
        imports=try_imports(IMPORTS) if with_imports else None,
        mpirun=shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), *os.get_exec_path()))),
        shared_memory_bytes=0 if room is None else room.f_blocks * room.f_frsize,
        shared_memory_free_bytes=0 if room is None else room.f_bavail * room.f_frsize,
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
    )


def try_imports(statements: Mapping[str, str]) -> dict[str, Import]:
    """Run each package's statements in a child of its own, all at once."""
    children = {
        package: subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        for package, code in statements.items()
    }
    return {package: _answer(child) for package, child in children.items()}


def _answer(child: subprocess.Popen[bytes]) -> Import:
    try:
        output, errors = child.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Import(False, f"its import hangs (ended after {IMPORT_SECONDS:g} s)")
    if child.returncode == 0:
        return Import(True, output.decode(errors="replace").strip())
    lines = errors.decode(errors="replace").strip().splitlines()
    if child.returncode < 0:
        return Import(False, f"its import dies of signal {-child.returncode}")
    return Import(False, lines[-1] if lines else f"its import ends with exit code {child.returncode}")


def _visible_gpus() -> tuple[str, ...]:
    return tuple(str(properties.uuid) for properties in _cuda_properties())


def _with_visible(found: HostGpus) -> HostGpus:
    """NVML's GPUs, and those that only CUDA shows (no NVML here, or an instance of MIG)."""
    known = {gpu.uuid for gpu in found.gpus}
    added = tuple(
        Gpu(index, str(one.uuid), one.name, (one.major, one.minor), one.total_memory, False, 0, "")
        for index, one in enumerate(_cuda_properties())
        if str(one.uuid) not in known
    )
    return replace(found, gpus=found.gpus + added)


def _cuda_properties() -> list[Any]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
