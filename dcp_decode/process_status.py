"""What the kernel says of a process in /proc/<pid>/stat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ENDED = "ZXx"
STOPPED = "Tt"


@dataclass(frozen=True)
class ProcessStatus:
    """state: the kernel's letter. start_time: clock ticks from boot; with the process id it names one process only."""

    state: str
    start_time: int

    @property
    def ended(self) -> bool:
        """Also as a zombie, which keeps nothing but its exit code."""
        return self.state in ENDED

    @property
    def stopped(self) -> bool:
        return self.state in STOPPED


def process_status(process_id: int) -> ProcessStatus | None:
    """None if there is no such process in this PID namespace."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name before it may hold spaces and brackets
    return ProcessStatus(fields[0], int(fields[19]))
