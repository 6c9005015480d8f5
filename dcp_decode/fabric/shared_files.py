"""Files in /dev/shm that have a name only while ranks map them, and lose it however their owner ends.

The owner holds a lock on its file; the kernel drops it with the process. So a file that nobody has locked was left by
a process that was killed: the peers that fail over that death remove it, or the launcher, or the next run.

Files without a name, opened by peers through /proc/<pid>/fd, would leave nothing to remove. But ranks of one host may
be in containers of their own, in other PID namespaces, or in other user namespaces, which refuse that.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from dcp_decode import owner_lock

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "dcp_decode-"

_named: dict[Path, int] = {}  # this process's files that have a name, with the descriptors that hold their locks


def create(folder: Path) -> tuple[Path, int]:
    """A new empty file, locked, and its descriptor, which is `remove`'s to close. Raises OSError."""
    while True:
        path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _named[path] = descriptor
        if owner_lock.take(descriptor) and os.fstat(descriptor).st_nlink:
            return path, descriptor
        remove(path)  # whoever removes abandoned files saw it before it was locked


def remove(path: Path) -> None:
    """Take the name from a file of this process; nothing if it has none any more."""
    path.unlink(missing_ok=True)
    descriptor = _named.pop(path, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_names() -> None:
    """Take the names from all files of this process, which is about to end; in any thread. Never raises."""
    for path in list(_named):
        with contextlib.suppress(OSError):
            path.unlink()  # the descriptor stays: another thread may be using it


def remove_abandoned(folder: Path = SHARED_MEMORY) -> None:
    """Remove this user's files whose owners no longer live. Never raises."""
    files = folder.glob(f"{PREFIX}*-*")
    owner_lock.remove_unowned(files, os.O_RDWR | os.O_NONBLOCK, lambda found: stat.S_ISREG(found.st_mode), Path.unlink)
