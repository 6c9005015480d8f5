"""From the facts of all ranks: which fabrics, kernels and launchers work here, why not the others, and the verdict.

Pure functions of facts, config and launcher; the rules are those by which `fabric/placement.py` places a run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_decode.config import RunConfig
from dcp_decode.device_rank import step_batches
from dcp_decode.doctor.facts import Import, RankFacts
from dcp_decode.doctor.gpus import Gpu
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.fabric.multicast import NVSHMEM, SYMMETRIC_MEMORY, forbid_multicast
from dcp_decode.fabric.placement import LEAST_CAPABILITY, processes_beside
from dcp_decode.host_memory import lack_of_memory
from dcp_decode.kernels.aot import check_build, read_manifest
from dcp_decode.kernels.sparse_layout import sparse_for
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES
from dcp_decode.mailbox import MailboxLayout
from dcp_decode.world import Launcher, check_world

NO_MULTICAST = {"nvshmem": NVSHMEM, "symm_mem": SYMMETRIC_MEMORY}
GPU_FABRICS = ("nvshmem", "symm_mem")
MIB = 2**20


@dataclass(frozen=True)
class Verdict:
    """Whether one thing works here, and how or why not."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same on all ranks: value -> ranks."""

    fact: str
    values: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Examination:
    """Everything that the doctor found. answer: one sentence, the verdict on running the config as it stands.

    device: cpu or cuda, what the run would use. kind: of that device, the name of its baselines.
    """

    ready: bool
    device: str
    kind: str
    answer: str
    fabrics: tuple[Verdict, ...]
    kernels: tuple[Verdict, ...]
    launchers: tuple[Verdict, ...]
    builds: tuple[Verdict, ...]
    differences: tuple[Difference, ...]


def examine(
    config: RunConfig, launcher: Launcher, ranks: Sequence[RankFacts], builds: Sequence[Path] = ()
) -> Examination:
    """Judge the facts of all ranks (one process without a launcher: it would start the config's ranks itself).

    builds: folders of kernels built ahead of time, besides the config's own.
    """
    group = _Group(config, launcher, ranks)
    fabrics = (group.loopback(), group.shm(), group.nvshmem(), group.symm_mem())
    on_gpu = group.on_gpu()
    chosen = group.choose(on_gpu, {verdict.name: verdict for verdict in fabrics})
    own = [] if config.parallel.kernels is None else [config.parallel.kernels]
    return Examination(
        ready=chosen.works,
        device="cuda" if on_gpu else "cpu",
        kind=group.kind(on_gpu),
        answer=chosen.reason,
        fabrics=fabrics,
        kernels=group.kernels(),
        launchers=group.launchers(),
        builds=tuple(group.build(folder) for folder in (*own, *builds)),
        differences=differences(ranks),
    )


def differences(ranks: Sequence[RankFacts]) -> tuple[Difference, ...]:
    """The facts that should be equal on all ranks of a run and are not."""
    everyone = [comparable(facts) for facts in ranks]
    found = []
    for fact in dict.fromkeys(key for facts in everyone for key in facts):
        values: dict[str, list[int]] = {}
        for facts, own in zip(ranks, everyone, strict=True):
            values.setdefault(own.get(fact, "absent"), []).append(facts.rank)
        if len(values) > 1:
            found.append(Difference(fact, values))
    return tuple(found)


def comparable(facts: RankFacts) -> dict[str, str]:
    """The facts that a run's ranks should have in common, as a table shows them: name -> text."""
    gpus = facts.gpus
    shown = {
        "processor": f"{facts.processor}, {facts.cores} cores",
        "system": facts.system,
        "driver": gpus.driver or "none",
        "CUDA of driver": gpus.cuda_driver or "none",
        "CUDA of torch": facts.cuda_torch or "none",
        "GPUs": _count(f"{gpu.name} {gpu.architecture}" for gpu in gpus.gpus) or gpus.problem,
        "GPUs visible": str(len(facts.visible_gpus)),
    }
    return shown | {f"package {name}": version for name, version in facts.versions.items()} | dict(facts.variables)


def kind_of(name: str) -> str:
    """A device's name as a file name: `NVIDIA H200` -> `nvidia-h200`."""
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def _count(names: Any) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


class _Group:
    """The ranks of a run: those that a launcher has started, or those that the config would fork here."""

    def __init__(self, config: RunConfig, launcher: Launcher, ranks: Sequence[RankFacts]) -> None:
        self.config = config
        self.launcher = launcher
        self.ranks = ranks
        self.size = config.parallel.dcp
        self.forked = launcher.name == "builtin"
        self.hosts = list(dict.fromkeys(facts.host for facts in ranks))
        self.per_host = Counter(facts.host for facts in ranks)
        if self.forked:
            self.per_host[ranks[0].host] = self.size

    def on_gpu(self) -> bool:
        """Where `dcp-decode run` would run, if it can."""
        parallel = self.config.parallel
        if parallel.device == "auto" and parallel.fabric not in GPU_FABRICS:
            return parallel.fabric != "shm" and not self.gpu_refusal()
        return parallel.device == "cuda" or parallel.fabric in GPU_FABRICS

    def choose(self, on_gpu: bool, fabrics: Mapping[str, Verdict]) -> Verdict:
        """What `dcp-decode run` would do, and whether it can."""
        try:
            check_world(self.launcher, self.config)
        except UnsupportedEnvironment as error:
            return Verdict("run", False, str(error))
        if on_gpu and (refusal := self.gpu_refusal()):
            return Verdict("run", False, f"parallel.device = {self.config.parallel.device}: {refusal}")
        if not on_gpu and self.config.parallel.chain == "fused":
            return Verdict("run", False, "parallel.chain = fused needs a GPU, but the ranks run on CPUs")
        fabric = self._fabric(on_gpu, fabrics)
        where = "GPU" if on_gpu else "CPU"
        if not fabric.works:
            return Verdict("run", False, f"fabric {fabric.name} on the {where}: {fabric.reason}")
        if not on_gpu and (refusal := self._no_memory()):
            return Verdict("run", False, refusal)
        if on_gpu and self.config.parallel.kernels is not None:
            build = self.build(self.config.parallel.kernels)
            if not build.works:
                return Verdict("run", False, build.reason)
        return Verdict("run", True, f"{self.size} ranks on the {where} over fabric {fabric.name}")

    def _no_memory(self) -> str:
        """Why the ranks of a host do not fit its memory, or nothing."""
        reasons = (
            lack_of_memory(self.config, self.per_host[facts.host], facts.host, facts.memory_bytes)
            for facts in self.ranks
        )
        return next(filter(None, reasons), "")

    def _fabric(self, on_gpu: bool, fabrics: Mapping[str, Verdict]) -> Verdict:
        named = self.config.parallel.fabric
        if named != "auto":
            return fabrics[named]
        gpus, device = len(self.ranks[0].visible_gpus), self.config.parallel.device
        if self.size == 1 or (self.forked and processes_beside(gpus, named, device, self.size) == 1):
            return fabrics["loopback"]
        if not on_gpu:
            return fabrics["shm"]
        return fabrics["nvshmem"] if not self._imports("nvshmem") else fabrics["symm_mem"]

    def kind(self, on_gpu: bool) -> str:
        """A name of the hardware for file names: the GPU and how many a host has, or the processor with its cores.

        On hosts with two H200s a query push took 1.70 and 1.72 us, with one 1.48: whoever sees only one of
        several measures as on several.
        """
        first = self.ranks[0]
        gpus = self._own_gpus()
        if not (on_gpu and gpus):
            return kind_of(f"{first.processor} {first.cores} cores")
        count = len(first.gpus.gpus)
        return kind_of(f"{gpus[0].name} {count} {'GPU' if count == 1 else 'GPUs'}")

    def build(self, folder: Path) -> Verdict:
        """Whether the kernels built in a folder are those of the config, for the GPUs here."""
        geometry, push = self.config.geometry(), self.config.parallel.route == "push"
        batches = step_batches(self.config.service.draft_tokens + 1, geometry)
        try:
            wanted = sorted({gpu.architecture for gpu in self._own_gpus()} or read_manifest(folder).libraries)
            for name in wanted:
                check_build(folder, geometry, push, batches, name)
        except ConfigError as error:
            return Verdict(str(folder), False, error.allowed)
        return Verdict(str(folder), True, f"for {', '.join(wanted)}, batches {', '.join(map(str, batches))}")

    def loopback(self) -> Verdict:
        if len(self.ranks) > 1:
            return Verdict("loopback", False, f"runs all ranks in one process: start it without {self.launcher.name}")
        place = "the CPU" if self.gpu_refusal() else f"the CPU or GPU {self._own_gpus()[0].name}"
        return Verdict("loopback", True, f"{self.size} ranks in one process, on {place}")

    def shm(self) -> Verdict:
        if len(self.hosts) > 1:
            return Verdict("shm", False, self._several_hosts())
        needed = self.size * MailboxLayout(self.config.geometry()).nbytes
        free = min(facts.shared_memory_free_bytes for facts in self.ranks)
        room = f"{needed / MIB:.0f} MiB of {free / MIB:.0f} MiB free in /dev/shm"
        return Verdict("shm", needed <= free, f"needs {room}" + ("" if needed <= free else " (docker: --shm-size)"))

    def nvshmem(self) -> Verdict:
        refusal = self.gpu_refusal() or self._imports("nvshmem") or self._multicast("nvshmem")
        gpus = self._own_gpus()
        if not refusal and len(self.hosts) > 1:
            domains = {gpu.domain for gpu in gpus}
            if len(domains) > 1 or "" in domains:
                refusal = f"{self._several_hosts()}, whose GPUs are not in one NVLink domain"
        refusal = refusal or self._no_peer_access()
        return Verdict("nvshmem", not refusal, refusal or f"{self.size} ranks on {self._spread()}")

    def symm_mem(self) -> Verdict:
        refusal = self.gpu_refusal() or self._multicast("symm_mem")
        distinct = len({gpu.uuid for gpu in self._own_gpus()})
        if not refusal and len(self.hosts) > 1:
            refusal = self._several_hosts()
        if not refusal and distinct < self.size:
            refusal = f"needs a GPU a rank: {self.size} ranks, {distinct} GPUs"
        refusal = refusal or self._no_peer_access()
        return Verdict("symm_mem", not refusal, refusal or f"{self.size} ranks on {self._spread()}")

    def kernels(self) -> tuple[Verdict, ...]:
        geometry, push = self.config.geometry(), self.config.parallel.route == "push"
        where = self.gpu_refusal()
        found = () if where else sorted({gpu.architecture for gpu in self._own_gpus()})
        refusals = (sparse_for(geometry, geometry.capacity, push, name) for name in found)
        refused = next((refusal for refusal in refusals if refusal is not None), None)
        fits = where or f"for {', '.join(found)}"
        return (
            Verdict("CPU stages", True, "all of them, on every CPU"),
            Verdict("query push, merge, top-k exchange", not where, fits),
            Verdict("sparse decode", not where and refused is None, where or (str(refused) if refused else fits)),
        )

    def launchers(self) -> tuple[Verdict, ...]:
        first = self.ranks[0]
        mpi = self._imports("mpi4py") or ("" if first.mpirun else "mpirun is not on the PATH")
        return (
            Verdict("builtin", True, f"forks {self.size} ranks on this host"),
            Verdict("torchrun", True, f"torch {first.versions.get('torch')}"),
            Verdict("mpi", not mpi, mpi or f"{self._answers('mpi4py')}, {first.mpirun}"),
        )

    def gpu_refusal(self) -> str:
        """Why a rank can't use a GPU, naming it, or nothing."""
        for facts in self.ranks:
            refusal = _gpu_refusal(facts)
            if refusal:
                return f"rank {facts.rank}: {refusal}" if len(self.ranks) > 1 else refusal
        return "" if self.config.parallel.kernels else self._imports("cutlass")

    def _own_gpus(self) -> list[Gpu]:
        """The GPU of each rank, as a run places it: the ranks of a host take its visible GPUs in turn."""
        placed: Counter[str] = Counter()
        gpus = []
        for facts in self.ranks:
            known = {gpu.uuid: gpu for gpu in facts.gpus.gpus}
            usable = [known[uuid] for uuid in facts.visible_gpus if uuid in known]
            for _ in range(self.size if self.forked else 1):
                if usable:
                    gpus.append(usable[placed[facts.host] % len(usable)])
                placed[facts.host] += 1
        return gpus

    def _no_peer_access(self) -> str:
        for facts in self.ranks:
            used = {gpu.index for gpu in self._own_gpus() if gpu in facts.gpus.gpus}
            for path in facts.gpus.paths:
                if {path.first, path.second} <= used and not path.peer_access:
                    return f"GPUs {path.first} and {path.second} of {facts.host} have no peer access ({path.kind})"
        return ""

    def _multicast(self, fabric: str) -> str:
        for facts in self.ranks:
            try:
                forbid_multicast(dict(facts.variables), NO_MULTICAST[fabric])
            except UnsupportedEnvironment as refusal:
                return f"rank {facts.rank}: {refusal}"
        return ""

    def _imports(self, package: str) -> str:
        """Why a package does not load on some host, or nothing."""
        for facts in self.ranks:
            answer = (facts.imports or {}).get(package, Import(True, ""))
            if not answer.works:
                return f"{package} does not load on {facts.host}: {answer.answer}"
        return ""

    def _answers(self, package: str) -> str:
        return next((facts.imports[package].answer for facts in self.ranks if facts.imports), "")

    def _several_hosts(self) -> str:
        return f"the ranks are on {len(self.hosts)} hosts ({', '.join(self.hosts)})"

    def _spread(self) -> str:
        return _count(gpu.name for gpu in {gpu.uuid: gpu for gpu in self._own_gpus()}.values())


def _gpu_refusal(facts: RankFacts) -> str:
    if not facts.visible_gpus:
        return f"no CUDA GPU: {_why_invisible(facts)}"
    known = {gpu.uuid: gpu for gpu in facts.gpus.gpus}
    for uuid in facts.visible_gpus:
        gpu = known.get(uuid)
        if gpu is not None and gpu.capability < LEAST_CAPABILITY:
            major, minor = gpu.capability
            return f"{gpu.name} has compute capability {major}.{minor}, and the kernels need 9.0 or later"
        if gpu is not None and gpu.architecture not in ARCHITECTURES:
            return f"{gpu.name} is {gpu.architecture}, and the kernels are for {', '.join(ARCHITECTURES)}"
    return ""


def _why_invisible(facts: RankFacts) -> str:
    if not facts.gpus.gpus:
        return facts.gpus.problem
    if facts.cuda_torch is None:
        return f"torch {facts.versions.get('torch')} is built without CUDA"
    shown = facts.variables.get("CUDA_VISIBLE_DEVICES")
    return "CUDA does not start" if shown is None else f"CUDA_VISIBLE_DEVICES={shown}"
