"""One rank of a run that replays graphs, of which a victim is killed or stopped between two steps.

python fault_rank.py CONFIG.toml kill|stop VICTIM STEP NOTE: the victim writes the time of its fault to the file NOTE.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from dcp_decode.config import RunConfig, load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.device_steps import StepPolicy
from dcp_decode.faults import stop_this_process
from dcp_decode.launcher import execute
from dcp_decode.records import RankReport
from dcp_decode.run import Progress, run_rank


def run_with_fault(
    config: RunConfig, control: ControlPlane, fault: str, victim: int, step: int, note: Path
) -> RankReport:
    """The rank's whole run. Without lockstep, also on a shared GPU: waits happen in graph replays, in the kernels."""

    def on_progress(progress: Progress) -> None:
        if control.rank != victim or progress.steps != step:
            return
        note.write_text(str(time.time()))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        stop_this_process(3 * config.mailbox.deadline_seconds)

    return run_rank(config, control, on_progress, policy=StepPolicy(lockstep=False)).report()


def main(path: str, fault: str, victim: str, step: str, note: str) -> int:
    config = load_config(Path(path))
    return execute(
        "run",
        config,
        lambda control: run_with_fault(config, control, fault, int(victim), int(step), Path(note)),
        None,
        lambda conclusion, plan: None,
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
