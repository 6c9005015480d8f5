"""The folder of a run's records while it lives; one that a killed run left behind goes with the next run.

A supervisor that is killed (SIGKILL) can remove nothing itself. So it holds a lock on its folder, and so do the ranks
that it forks; the kernel drops the lock with the last of them, in any PID namespace. A folder that is not locked has
nobody, unless it is so new that its maker has not locked it yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "dcp_decode-run-"
NEW_SECONDS = 60.0  # a folder that was changed less than so long ago is left alone


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, locked by this process and its forks, removed at the end; removes what killed runs have left."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            _lock(descriptor)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's scratch folders in `parent` that no process has locked. Never raises."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's, or another run removes it too
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and time.time() - found.st_mtime >= NEW_SECONDS and _lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Whether the lock was free and is now this process's; False too where a file system has no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
