"""One entry for a group of ranks under any launcher: our own (fork), torchrun, or MPI.

The environment says which: torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, MPI sets OMPI_COMM_WORLD_* or
PMI_*. Under the built-in launcher and `launch/*.sh` somebody outlives the ranks and concludes from their records;
under a bare torchrun or mpirun the lowest rank that lives does it, as far as it can.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dcp_decode.config import RunConfig
from dcp_decode.control.plane import ControlPlane
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.control.torchrun import connect_torchrun
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.fabric.placement import processes_to_start
from dcp_decode.forensics.conclusion import conclude_folder, keep
from dcp_decode.process_status import process_status
from dcp_decode.rank_process import Body, RankProcess, leave
from dcp_decode.records import RECORDS_VARIABLE, Plan, RankRecord, await_records, make_plan, read_records, write_plan
from dcp_decode.results import Conclusion, conclude, require_writable
from dcp_decode.scratch import scratch_folder
from dcp_decode.supervisor import supervise
from dcp_decode.world import Launcher, check_world

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI_VARIABLES = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
LATE_RECORDS_SECONDS = 0.5
LARGEST_WORLD = 1 << 20

Publish = Callable[[Conclusion, Plan], None]


def detect_launcher(environment: Mapping[str, str]) -> Launcher:
    """Raises UnsupportedEnvironment if the environment is torchrun's and MPI's at once, or only half torchrun's.

    Raises ConfigError for a variable that is no number of a rank, size or port.
    """
    by_mpi = [names for names in MPI_VARIABLES if all(name in environment for name in names)]
    if "WORLD_SIZE" in environment and "RANK" in environment:
        missing = [name for name in TORCHRUN_VARIABLES if name not in environment]
        if missing:
            raise UnsupportedEnvironment(f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not; use torchrun")
        if by_mpi:
            raise UnsupportedEnvironment(
                f"started by torchrun (WORLD_SIZE) and by MPI ({by_mpi[0][1]}) at once; use one of them"
            )
        _integer(environment, "MASTER_PORT", 0, 65_535)
        return _launcher("torchrun", environment, "RANK", "WORLD_SIZE")
    if by_mpi:
        return _launcher("mpi", environment, *by_mpi[0])
    return Launcher("builtin", 0, 1)


def _launcher(name: str, environment: Mapping[str, str], rank: str, size: str) -> Launcher:
    ranks = _integer(environment, size, 1, LARGEST_WORLD)
    return Launcher(name, _integer(environment, rank, 0, ranks - 1), ranks)


def _integer(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise ConfigError(name, text, f"must be an integer in {least} .. {most}")
    return int(text)


def connect(launcher: Launcher, deadline_seconds: float) -> ControlPlane:
    """The control plane of this process among the ranks that the launcher started; collective. Raises WaitFailed."""
    if launcher.name == "builtin":
        return SoloControlPlane()
    if launcher.name == "torchrun":
        return connect_torchrun(os.environ, deadline_seconds)
    from dcp_decode.control.mpi import MpiControlPlane  # imports mpi4py, which starts MPI

    return MpiControlPlane(deadline_seconds)


def execute(command: str, config: RunConfig, body: Body, output: str | None, publish: Publish) -> int:
    """Run the body as the ranks of the config under the launcher that started this process; the exit code.

    `publish` is called once for the whole group, wherever the conclusion is drawn. Raises DcpDecodeError before any
    rank has started; afterwards every failure is in the records.
    """
    launcher = detect_launcher(os.environ)
    check_world(launcher, config)
    shared = os.environ.get(RECORDS_VARIABLE)
    if launcher.rank == 0 and not shared:  # else `--prepare` has seen to it
        require_writable(output)
    plan = make_plan(command, config, launcher.name, output)
    if launcher.name == "builtin":
        parallel = config.parallel
        processes = processes_to_start(parallel.fabric, parallel.device, parallel.dcp)
        return _execute_here(replace(plan, processes=processes), config, body, publish)
    return _execute_as_rank(plan, config, body, publish, launcher)


def _execute_here(plan: Plan, config: RunConfig, body: Body, publish: Publish) -> int:
    with scratch_folder() as folder:
        write_plan(folder, plan)
        supervise(
            body,
            plan.processes,
            folder,
            wait_deadline_seconds=config.mailbox.deadline_seconds,
            control_deadline_seconds=config.mailbox.control_deadline_seconds,
        )
        conclusion = conclude_folder(plan, folder)
    publish(conclusion, plan)
    return conclusion.exit_code


def _execute_as_rank(plan: Plan, config: RunConfig, body: Body, publish: Publish, launcher: Launcher) -> int:
    shared = os.environ.get(RECORDS_VARIABLE)
    folder = Path(shared) if shared else _folder_of_parent()
    process = RankProcess(launcher.rank, folder)
    process.handle_terminate()
    record = process.run(lambda: connect(launcher, config.mailbox.control_deadline_seconds), body)
    if not shared and _concludes(record, folder):
        records = dict(enumerate(process.records)) or _late_records(folder, plan.processes, record)
        publish(keep(conclude(plan, records), plan, folder), plan)
        shutil.rmtree(folder, ignore_errors=True)
    if record.outcome != "ok":
        leave(record.exit_code)  # not through MPI_Finalize, which waits for peers that may be gone
    return record.exit_code


def _concludes(record: RankRecord, folder: Path) -> bool:
    """Whether this rank draws the conclusion: all lower ones died without a word."""
    spoken = read_records(folder)
    return all(str(rank) in record.dead_peers and rank not in spoken for rank in range(record.rank))


def _late_records(folder: Path, processes: int, record: RankRecord) -> dict[int, RankRecord]:
    """The records of a bare launcher's ranks, after a short wait for those that still live."""
    silent = record.dead_peers.keys() - set(map(str, read_records(folder)))
    return await_records(folder, processes - len(silent), LATE_RECORDS_SECONDS)


def _folder_of_parent() -> Path:
    """A folder that the ranks of one bare torchrun or mpirun on this host share: named after their parent process."""
    parent = os.getppid()
    status = process_status(parent)
    started = 0 if status is None else status.start_time
    folder = Path(tempfile.gettempdir()) / f"dcp_decode-{os.getuid()}-{parent}-{started}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
