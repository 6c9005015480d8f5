"""What a compiled kernel depends on besides its configuration: the sources it is made from. No cutlass."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
# Modules above the kernels that shape their code: mailbox offsets, constants, sizes.
MODULES = ("digest.py", "formats.py", "geometry.py", "mailbox.py", "numerics.py")


@cache
def source_hash() -> str:
    """SHA-256 over the names and bytes of the kernels package and of the modules that it builds on."""
    whole = hashlib.sha256()
    for path in sorted(PACKAGE.glob("*.py")) + [PACKAGE.parent / name for name in MODULES]:
        whole.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()
