"""Bytes of a file that somebody named: bounded, and never a wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

LARGEST_INPUT_BYTES = 64 << 20  # a checkpoint's document with all its rounds has 0.5 MB


def read_input(path: Path, most: int = LARGEST_INPUT_BYTES) -> bytes:
    """The bytes of a regular file. Raises OSError for anything else (a pipe may never end) and for a larger one."""
    # Without O_NONBLOCK opening a pipe waits for its other end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is a directory, a pipe or a device", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
        return file.read()
