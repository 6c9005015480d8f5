"""Runs groups of rank processes under injected faults, for test_faults.py.

A process of its own (`FaultGroups` starts it) forks the ranks: its parent, the test process, has used torch's threads.
Requests and answers are pickles on a pipe of theirs.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.faults import FaultInjector, FaultPlan
from dcp_decode.forensics.conclusion import conclude_folder
from dcp_decode.forensics.diagnosis import Diagnosis
from dcp_decode.records import RankReport, make_plan
from dcp_decode.run import run_rank
from dcp_decode.soak import read_counts, write_counts
from dcp_decode.step import LayerRun
from dcp_decode.supervisor import supervise

HANG_SECONDS = 60.0


@dataclass(frozen=True)
class Request:
    """A run to make: overrides by dotted key over the defaults, [workload.synthetic] included, and its faults."""

    overrides: dict[str, Any]
    faults: FaultPlan


@dataclass(frozen=True)
class Answer:
    """How it ended. merged: (rank, step, layer) -> BF16 [B, H, 512], as far as ranks came.

    counts: injected faults. cause: what the archive of forensics says, if there is one.
    """

    exit_code: int
    error: str | None
    dead_ranks: tuple[int, ...]
    expired_waits: list[dict[str, Any]]
    digest: str | None
    verified: bool | None
    counts: dict[str, float]
    merged: dict[tuple[int, int, int], torch.Tensor]
    cause: Diagnosis | None


def run_group(request: Request) -> Answer:
    """Fork the ranks, wait for them, and conclude."""
    config = load_config(None, request.overrides)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as results:
        folder = Path(name)
        plan = make_plan("run", config, "builtin", str(Path(results) / "run.json"))
        supervise(
            lambda control: _run_rank(config, request.faults, folder, control),
            plan.processes,
            folder,
            wait_deadline_seconds=config.mailbox.deadline_seconds,
            control_deadline_seconds=config.mailbox.control_deadline_seconds,
        )
        conclusion = conclude_folder(plan, folder)
        merged: dict[tuple[int, int, int], torch.Tensor] = {}
        for path in folder.glob("merged-*"):
            merged |= torch.load(path)
        document = conclusion.document
        return Answer(
            conclusion.exit_code,
            conclusion.error,
            conclusion.dead_ranks,
            document["expired_waits"],
            document["digest"],
            document["verified"],
            asdict(read_counts(folder)),
            merged,
            Diagnosis(**document["first_cause"]) if document["first_cause"] else None,
        )


def _run_rank(config: RunConfig, faults: FaultPlan, folder: Path, control: ControlPlane) -> RankReport:
    injector = FaultInjector(faults, config.model.layers, config.parallel.route)
    seen: list[LayerRun] = []

    def before_stage(run: LayerRun, stage: str) -> None:
        if stage == "append":
            seen.append(run)
        injector(run, stage)

    try:
        summary = run_rank(config, control, None, before_stage)
    finally:
        write_counts(folder, control.rank, injector.counts)
    layers = config.model.layers
    calls: dict[int, int] = {}
    merged = {}
    for run in seen:
        number = calls.get(run.state.rank, 0)
        calls[run.state.rank] = number + 1
        merged[run.state.rank, number // layers, run.layer] = run.merged
    torch.save(merged, folder / f"merged-{control.rank}")
    return summary.report()


class FaultGroups:
    """The test's end: one such process, and runs in it one after the other."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()

    def run(self, overrides: dict[str, Any], faults: FaultPlan | None = None) -> Answer:
        """Raises TimeoutError if the group hangs."""
        self._connection.send(Request(overrides, faults or FaultPlan()))
        if not self._connection.poll(HANG_SECONDS):
            self._process.kill()  # its ranks die with it
            raise TimeoutError(f"no end after {HANG_SECONDS:g} s")
        return pickle.loads(self._connection.recv())

    def close(self) -> None:
        self._connection.close()
        self._process.wait(HANG_SECONDS)


def serve(connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        # Plain pickle: the connection's own pickler would share the tensors' memory, which ends with this process.
        connection.send(pickle.dumps(run_group(request)))


if __name__ == "__main__":
    import fault_group  # so that pickles name this module, not __main__

    fault_group.serve(Connection(int(sys.argv[1])))
