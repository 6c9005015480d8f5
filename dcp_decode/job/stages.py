"""The stages of a CI job, as command lines of this repository that a person can paste.

doctor      what the machine offers; the job ends with 2 if the config can't run here
group       the config under torchrun, verified; on several nodes this is all that nodes 1, 2, ... take part in
mpi         the same under mpirun, with the same digest
tests       integration tests of launchers, fabrics and waits on the CPUs, side by side where there are cores for it
gpu         whole runs on a GPU, and processes that share it: one after the other, as each needs it alone
kernels     the kernels' own cases on a GPU, side by side: most of their time is compilation
multigpu    a rank a GPU, where there are several
soak        delays and stops, which must change no bit
checkpoint  latencies: of the kernels on a GPU, of a layer step on a CPU
gate        the checkpoint against the committed one of this kind of device: ratios, not absolute times
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("doctor", "group", "mpi", "tests", "gpu", "kernels", "multigpu", "soak", "checkpoint", "gate")
INJECTIONS = ("hang", "wrong-bit", "slowdown")
SLOWDOWN = "0.2"

REPOSITORY = Path(__file__).resolve().parent.parent.parent
STEPS = "3"  # of a verified run
VERIFIED_SECONDS = 240  # its limit: 24 layers (configs/kimi_k31_trace.toml) took 8 ranks on two busy CPU cores 135
SOAK_STEPS = "200"  # of a round
LIMITS = {"cpu": "1.1", "cuda": "1.05"}  # of the gate; on a CPU runs differ by more than their own noise shows
CPU_STEPS = "70"  # of the CPU benchmark, 20 of them warm-up
INTEGRATION_TESTS = ("tests/test_launch_external.py", "tests/test_fabric_shm.py", "tests/test_cpu_waits.py")
GPU_TESTS = "tests/gpu"
WORKER_BYTES = 8 << 30  # of GPU memory, for a process that runs the kernels' cases
TEST_CORES = 4  # of an integration test: it starts eight ranks, most of which wait
MOST_TESTS = 4  # at once: a handful takes most of their time
LEAST_WORKERS = 4  # 1,062 cases take 20 minutes of a process (results/kernels-h200-20261130.json)


@dataclass(frozen=True)
class Settings:
    """What a job is asked for. artifacts: this node's folder; shared: the one that all nodes see.

    inject: one of INJECTIONS. nodes, node: how many there are, and which this is.
    """

    config: str
    artifacts: Path
    shared: Path
    device: str
    baselines: Path
    soak_minutes: float
    inject: str | None
    nodes: int = 1
    node: int = 0


@dataclass(frozen=True)
class Hardware:
    """What the doctor found. device: cpu or cuda; kind: the name of its baselines; gpus, cores: that this node may use.

    gpu_bytes: memory of its smallest GPU.
    """

    device: str = "cpu"
    kind: str = "unknown"
    gpus: int = 0
    cores: int = 1
    gpu_bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """One command. skip: why it isn't run. output: the file for its standard output, if not the log.

    verifies: its document must say that rows were verified. same_digest_as: a stage whose document must hold the same
    digest as this one's.
    """

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    skip: str = ""
    output: str | None = None
    verifies: bool = False
    same_digest_as: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def doctor(settings: Settings) -> Stage:
    """The first stage, on which the others depend; on several nodes all ranks meet in it."""
    command = [*_ours(settings, "doctor"), settings.config, "--device", settings.device, "--json"]
    return Stage("doctor", tuple(command), 180, output="doctor.json", environment=_records(settings, "doctor"))


def following(settings: Settings, hardware: Hardware) -> list[Stage]:
    """The stages after the doctor."""
    if settings.node > 0:
        return [_group(settings)]
    return [
        _group(settings),
        _mpi(settings),
        _tests(settings, hardware),
        _gpu(settings, hardware),
        _kernels(settings, hardware),
        _multigpu(settings, hardware),
        _soak(settings),
        _checkpoint(settings, hardware),
        _gate(settings, hardware),
    ]


def _group(settings: Settings) -> Stage:
    command = [_script("torchrun.sh"), *_run(settings, "group")]
    if settings.inject in ("hang", "wrong-bit"):
        command += ["--inject", settings.inject]
    # Of several nodes the first one has the document.
    verifies, records = settings.node == 0, _records(settings, "group")
    return Stage("group", tuple(command), VERIFIED_SECONDS, verifies=verifies, environment=records)


def _mpi(settings: Settings) -> Stage:
    skip = "" if settings.nodes == 1 else "runs on one node only"
    command = (_script("mpirun.sh"), *_run(settings, "mpi"))
    return Stage("mpi", command, VERIFIED_SECONDS, skip=skip, verifies=True, same_digest_as="group")


def _run(settings: Settings, name: str) -> list[str]:
    output = str(settings.artifacts / f"{name}.json")
    where = ["--device", settings.device, "--output", output]
    return ["run", settings.config, *where, "--max-steps", STEPS, "--verify", "every"]


def _tests(settings: Settings, hardware: Hardware) -> Stage:
    options = [*_pytest(settings, "tests", "not gpu"), *_failures(settings, "tests")]
    workers = min(hardware.cores // TEST_CORES, MOST_TESTS)
    if workers > 1 and not _lacking("pytest-xdist"):
        options += ["-n", str(workers), "--dist", "worksteal"]  # groups are for machines with few cores
    skip = _lacking("pytest", "pytest-timeout")
    return Stage("tests", (sys.executable, *options, *INTEGRATION_TESTS), 300, skip=skip)


def _gpu(settings: Settings, hardware: Hardware) -> Stage:
    # A job holds ratios (`gate`), not microseconds of a host that others may share.
    options = (*_pytest(settings, "gpu", "gpu and alone and not quiet"), *_failures(settings, "gpu"))
    skip = _lacking("pytest", "pytest-timeout") if hardware.device == "cuda" else "needs a GPU"
    return Stage("gpu", (sys.executable, *options, GPU_TESTS), 300, skip=skip)


def _kernels(settings: Settings, hardware: Hardware) -> Stage:
    workers = min(hardware.cores, hardware.gpu_bytes // WORKER_BYTES)
    options = (*_pytest(settings, "kernels", "gpu and not alone"), *_failures(settings, "kernels"), "-n", str(workers))
    skip = _lacking("pytest", "pytest-timeout", "pytest-xdist")
    if hardware.device != "cuda":
        skip = "needs a GPU"
    elif workers < LEAST_WORKERS:
        room = f"{hardware.cores} cores and {hardware.gpu_bytes >> 30} GiB of GPU memory"
        skip = (
            f"needs room for {LEAST_WORKERS} processes of {WORKER_BYTES >> 30} GiB, and here are {room}: make test-gpu"
        )
    return Stage("kernels", (sys.executable, *options, GPU_TESTS), 600, skip=skip)


def _multigpu(settings: Settings, hardware: Hardware) -> Stage:
    ranks = max((ranks for ranks in (2, 4, 8) if ranks <= hardware.gpus), default=0)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    skip = _lacking("pytest", "pytest-timeout") if ranks else f"needs several GPUs, and {hardware.gpus} are here"
    return Stage("multigpu", (*torchrun, *_pytest(settings, "multigpu", "multigpu"), GPU_TESTS), 300, skip=skip)


def _pytest(settings: Settings, name: str, markers: str) -> tuple[str, ...]:
    """A stage's arguments of Python: it also leaves the results as JUnit XML."""
    results = f"--junit-xml={settings.artifacts / f'{name}.xml'}"
    return ("-m", "pytest", "-p", "no:cacheprovider", "-rfEs", "--durations=10", results, "-m", markers)


def _failures(settings: Settings, name: str) -> tuple[str, ...]:
    """Options of pytest that keep the files of failed tests, such as forensics, in a folder of the artifacts."""
    return (f"--basetemp={settings.artifacts / f'{name}-failures'}", "-o", "tmp_path_retention_policy=failed")


def _lacking(*packages: str) -> str:
    """Why tests can't run that need these packages, or nothing."""
    lacking = []
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(package)
    return f"needs {', '.join(lacking)} (make install)" if lacking else ""


def _soak(settings: Settings) -> Stage:
    command = [*_ours(settings, "soak", group=False), "configs/soak.toml", "--max-steps", SOAK_STEPS]
    command += ["--minutes", f"{settings.soak_minutes:g}", "--output", str(settings.artifacts / "soak.json")]
    return Stage("soak", tuple(command), 120 + 120 * settings.soak_minutes)


def _checkpoint(settings: Settings, hardware: Hardware) -> Stage:
    output = str(settings.artifacts / "checkpoint.json")
    if hardware.device == "cuda":
        command = [*_ours(settings, "checkpoint", group=False), "configs/latency_checkpoint.toml", "--quick"]
        command += ["--html", str(settings.artifacts / "checkpoint.html")]
    else:
        command = [sys.executable, "-m", "dcp_decode.checkpoint.cpu", "--steps", CPU_STEPS]
    if settings.inject == "slowdown":
        command += ["--slowdown", SLOWDOWN]
    return Stage("checkpoint", (*command, "--output", output), 240)


def _gate(settings: Settings, hardware: Hardware) -> Stage:
    baseline = settings.baselines / f"{hardware.kind}.json"
    new = settings.artifacts / "checkpoint.json"
    command = [*_ours(settings, "compare", group=False), str(baseline), str(new), "--limit", LIMITS[hardware.device]]
    skip = "" if baseline.is_file() else f"no {baseline}: commit this run's {new} there"
    return Stage("gate", (*command, "--output", str(settings.artifacts / "gate.json")), 60, skip=skip)


def _ours(settings: Settings, command: str, group: bool = True) -> list[str]:
    """A command of dcp-decode: in one process, or (group, several nodes) as the ranks of torchrun."""
    if group and settings.nodes > 1:
        return [_script("torchrun.sh"), command]
    return [sys.executable, "-m", "dcp_decode", command]


def _script(name: str) -> str:
    return str(REPOSITORY / "launch" / name)


def _records(settings: Settings, name: str) -> dict[str, str]:
    return {} if settings.nodes == 1 else {"DCP_DECODE_RECORDS": str(settings.shared / f"records-{name}")}
