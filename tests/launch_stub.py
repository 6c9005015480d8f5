"""A group of ranks with a stub body, started by whatever launcher runs this script.

python tests/launch_stub.py BEHAVIOUR SIZE OUTPUT      # or under torchrun / mpirun with SIZE ranks
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from dcp_decode.config import load_config
from dcp_decode.control.plane import ControlPlane
from dcp_decode.launcher import execute
from dcp_decode.presentation import publish
from dcp_decode.records import RankReport


def report(verified: bool | None = True, digest: str = "stub") -> RankReport:
    """A report with no figures."""
    return RankReport(
        fabric="stub",
        device="cpu",
        family="stub",
        verified=verified,
        worst_error=0.5,
        error_bound=0.25 if verified is False else 1.0,
        checked_steps=1,
        digest=digest,
        requests={"in": 0},
        refusals=[],
        steps=0,
        tokens=0,
        acceptance=[],
        error="a row left its bound" if verified is False else None,
    )


def collectives(control: ControlPlane) -> RankReport:
    """Every operation many times, with values of many sizes; the digest proves what arrived."""
    for turn in range(20):
        value = (control.rank, turn, b"x" * (control.rank * 40_000))
        expected = [(rank, turn, b"x" * (rank * 40_000)) for rank in range(control.size)]
        assert control.all_gather(value, f"gather {turn}") == expected
        assert control.broadcast(control.rank * 10 + 7, "seven") == 7
        control.barrier("meeting")
    assert [peer.process_id for peer in control.peers][control.rank] == os.getpid()
    return report(digest=f"{control.name} {control.size}")


def kill_one(control: ControlPlane, victim: int = -1) -> RankReport:
    """A rank (default: the last) is killed while the others wait for it."""
    if control.rank == victim % control.size:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    control.barrier("meeting")
    return report()


def kill_first(control: ControlPlane) -> RankReport:
    return kill_one(control, 0)


def raise_one(control: ControlPlane) -> RankReport:
    if control.rank == 1:
        raise KeyError("a defect")
    control.barrier("meeting")
    return report()


def wait_long(control: ControlPlane) -> RankReport:
    process_ids = control.all_gather(os.getpid(), "process ids")
    if control.rank == 0:
        print(*process_ids, flush=True)
    time.sleep(600)
    return report()


BODIES = {"collectives": collectives, "kill": kill_one, "kill first": kill_first, "raise": raise_one, "wait": wait_long}


def main() -> int:
    behaviour, size, output = sys.argv[1:]
    config = load_config(None, {"parallel.dcp": int(size), "mailbox.deadline_seconds": 0.2})
    return execute(f"stub {behaviour}", config, BODIES[behaviour], str(Path(output)), publish)


if __name__ == "__main__":
    sys.exit(main())
