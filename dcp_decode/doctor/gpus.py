"""The GPUs of this host as NVML sees them: names, drivers, peer access, NVLink. Reads only, needs no CUDA context.

Drivers, virtual machines and older GPUs leave questions unanswered: such an answer is absent here, never a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_decode.kernels.sparse_refusal import architecture_name

PEER_READ, PEER_WRITE = 0, 1  # nvmlGpuP2PCapsIndex_t; the Python binding has a tuple for the first
PEER_ACCESS_WORKS = 0
LINK_ACTIVE = 1
LINK_TO_GPU, LINK_TO_SWITCH = 0, 2
FABRIC_COMPLETED = 3
# nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo --matrix`.
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True)
class Gpu:
    """One GPU. nvlinks: active links. domain: its NVLink domain across hosts (cluster and clique), or nothing.

    memory_bytes: in all. partitioned: in MIG mode.
    """

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    partitioned: bool
    nvlinks: int
    domain: str

    @property
    def architecture(self) -> str:
        return architecture_name(self.capability)


@dataclass(frozen=True)
class PeerPath:
    """How two GPUs of a host reach each other: NV and a count of NVLinks, or the common ancestor on PCIe."""

    first: int
    second: int
    kind: str
    peer_access: bool


@dataclass(frozen=True)
class HostGpus:
    """Everything about a host's GPUs; problem: why there is nothing, or less than there could be."""

    driver: str | None = None
    cuda_driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    paths: tuple[PeerPath, ...] = ()
    problem: str = ""


def observe_gpus(nvml: Any = None) -> HostGpus:
    """Ask NVML (`nvml`: a stand-in for the module pynvml)."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return HostGpus(problem="nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return HostGpus(problem=f"no NVIDIA driver ({error})")
    try:
        return _Observer(nvml).observe()
    finally:
        with contextlib.suppress(nvml.NVMLError):  # as of a driver that has lost a GPU
            nvml.nvmlShutdown()


class _Observer:
    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def observe(self) -> HostGpus:
        nvml = self.nvml
        count = self._ask(nvml.nvmlDeviceGetCount, absent=0)
        answers = {index: self._ask(nvml.nvmlDeviceGetHandleByIndex, index, absent=None) for index in range(count)}
        handles = {index: handle for index, handle in answers.items() if handle is not None}
        lost = ", ".join(str(index) for index in answers if index not in handles)
        problem = "" if handles else "the driver has no GPU"
        if lost:
            problem = f"the driver can't open GPU {lost} of {count}"
        version = self._ask(nvml.nvmlSystemGetCudaDriverVersion_v2, absent=None)
        return HostGpus(
            driver=self._ask(nvml.nvmlSystemGetDriverVersion, absent=None),
            cuda_driver=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
            gpus=tuple(self._gpu(index, handle) for index, handle in handles.items()),
            paths=tuple(
                PeerPath(
                    first, second, self._kind(handles[first], handles[second]), self._reaches(handles, first, second)
                )
                for first, second in itertools.combinations(handles, 2)
            ),
            problem=problem,
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any, absent: Any) -> Any:
        try:
            return question(*arguments)
        except self.nvml.NVMLError:
            return absent

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self.nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle, absent=None)
        return Gpu(
            index=index,
            uuid=self._ask(nvml.nvmlDeviceGetUUID, handle, absent="").removeprefix("GPU-"),
            name=self._ask(nvml.nvmlDeviceGetName, handle, absent="unknown"),
            capability=tuple(self._ask(nvml.nvmlDeviceGetCudaComputeCapability, handle, absent=(0, 0))),
            memory_bytes=0 if memory is None else memory.total,
            partitioned=bool(self._ask(nvml.nvmlDeviceGetMigMode, handle, absent=(0, 0))[0]),
            nvlinks=len(self._links(handle)),
            domain=self._domain(handle),
        )

    def _links(self, handle: Any) -> list[str]:
        """What each active NVLink leads to: a bus address, or a switch."""
        nvml, ends = self.nvml, []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if self._ask(nvml.nvmlDeviceGetNvLinkState, handle, link, absent=0) != LINK_ACTIVE:
                continue
            kind = self._ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link, absent=LINK_TO_SWITCH)
            remote = self._ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link, absent=None)
            ends.append(_bus(remote) if kind == LINK_TO_GPU and remote is not None else "switch")
        return ends

    def _kind(self, one: Any, other: Any) -> str:
        nvml = self.nvml
        links = self._links(one)
        address = self._ask(nvml.nvmlDeviceGetPciInfo, other, absent=None)
        direct = links.count(_bus(address)) if address is not None else 0
        count = direct or min(links.count("switch"), self._links(other).count("switch"))
        if count:
            return f"NV{count}"
        return ANCESTORS.get(self._ask(nvml.nvmlDeviceGetTopologyCommonAncestor, one, other, absent=-1), "unknown")

    def _reaches(self, handles: Mapping[int, Any], first: int, second: int) -> bool:
        pairs = ((handles[first], handles[second]), (handles[second], handles[first]))
        return all(
            self._ask(self.nvml.nvmlDeviceGetP2PStatus, *pair, capability, absent=None) == PEER_ACCESS_WORKS
            for pair in pairs
            for capability in (PEER_READ, PEER_WRITE)
        )

    def _domain(self, handle: Any) -> str:
        nvml = self.nvml
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        if self._ask(nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info), absent=None) is None:
            return ""
        cluster = bytes(info.clusterUuid).hex()
        return f"{cluster}:{info.cliqueId}" if info.state == FABRIC_COMPLETED and int(cluster, 16) else ""


def _bus(address: Any) -> str:
    text = address.busId
    return text.decode() if isinstance(text, bytes) else text
