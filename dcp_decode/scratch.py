"""The folder of a run's records while it lives; one that a killed run left behind goes with the next run.

A supervisor that is killed (SIGKILL) can remove nothing itself. So it holds a lock on its folder, and so do the ranks
that it forks; the kernel drops the lock with the last of them, in any PID namespace. A folder that is not locked has
nobody, unless it is so new that its maker has not locked it yet.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dcp_decode import owner_lock

PREFIX = "dcp_decode-run-"
NEW_SECONDS = 60.0  # a folder that was changed less than so long ago is left alone


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder, locked by this process and its forks, removed at the end; removes what killed runs have left."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # without locks nobody removes the folder of a killed run
                owner_lock.take(descriptor)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's scratch folders in `parent` that no process has locked. Never raises."""
    owner_lock.remove_unowned(
        parent.glob(f"{PREFIX}*"),
        os.O_RDONLY | os.O_DIRECTORY,
        lambda found: time.time() - found.st_mtime >= NEW_SECONDS,
        lambda folder: shutil.rmtree(folder, ignore_errors=True),
    )
