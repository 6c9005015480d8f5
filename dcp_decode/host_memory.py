"""How much of a host's memory the ranks of a run take, and how much there is for them.

In a container the limit of its control group counts, not the machine's memory: whoever passes it is killed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath

from dcp_decode.config import RunConfig
from dcp_decode.formats import ROW_BYTES
from dcp_decode.mailbox import MailboxLayout


def memory_bytes(root: Path = Path("/")) -> int:
    """Of this machine, or the smallest limit of this process's control groups (version 1 or 2). root: of the files."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mounted, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mounted, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(group.lstrip("/"))
        for place in (own, *own.parents):  # a container may see its own group as the topmost one
            with contextlib.suppress(OSError, ValueError):  # no file there, or "max"
                limits.append(int((mounted / place / name).read_text()))
    return min(limits)


def needed_bytes(config: RunConfig) -> int:
    """Of a rank on a CPU: its cache and its mailboxes, which count wherever they lie (/dev/shm is memory too)."""
    cache = config.model.layers * config.cache.pages * config.cache.page_stride_rows * ROW_BYTES
    return cache + MailboxLayout(config.geometry()).nbytes


def lack_of_memory(config: RunConfig, ranks: int, host: str, available: int) -> str:
    """Why `ranks` ranks do not fit the memory of a host, or nothing."""
    needed = ranks * needed_bytes(config)
    if needed <= available:
        return ""
    what = f"{ranks} ranks x {config.model.layers} layers x {config.cache.pages} pages and the mailboxes"
    take = f"take {needed / 2**30:.1f} GiB, and {host} has {available / 2**30:.1f}"
    return f"cache.pages = {config.cache.pages}: {what} {take}"
