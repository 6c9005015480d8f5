"""A lock that says whether a file or folder still has an owner: the kernel drops it with the owner's process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def take(descriptor: int) -> bool:
    """Whether the lock was free and is now this descriptor's. Raises OSError where a file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_unowned(
    paths: Iterable[Path], flags: int, fits: Callable[[os.stat_result], bool], remove: Callable[[Path], object]
) -> None:
    """Remove those of this user's that fit and that nobody has locked; flags open them. Never raises."""
    with contextlib.suppress(OSError):
        for path in paths:
            with contextlib.suppress(OSError):  # another user's, or another process removes it too
                descriptor = os.open(path, flags | os.O_NOFOLLOW)
                try:
                    found = os.fstat(descriptor)
                    if found.st_uid == os.geteuid() and fits(found) and take(descriptor):
                        remove(path)
                finally:
                    os.close(descriptor)
