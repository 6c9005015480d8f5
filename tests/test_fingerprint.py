"""What the key of a compiled kernel knows of its sources."""

from __future__ import annotations

import ast
from pathlib import Path

from dcp_decode.kernels import fingerprint

ROOT = fingerprint.PACKAGE.parent.parent
PLAIN = {"errors.py", "fabric/memory.py"}  # imported too, and nothing of them is in a kernel


def imported(path: Path) -> list[str]:
    """Names of the modules, and of what may be modules, that a file imports when it is imported."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def test_every_module_that_shapes_a_kernel_is_in_its_key() -> None:
    kernels = list(fingerprint.PACKAGE.glob("*.py"))
    found = {path for path in kernels if any(name.split(".")[0] == "cutlass" for name in imported(path))}
    assert len(found) > 20
    waiting = list(found)
    while waiting:
        files = {(ROOT / name.replace(".", "/")).with_suffix(".py") for name in imported(waiting.pop())}
        fresh = {path for path in files if path.is_file() and path.is_relative_to(ROOT / "dcp_decode")} - found
        found |= fresh
        waiting += fresh
    above = {str(path.relative_to(ROOT / "dcp_decode")) for path in found - set(kernels)}
    assert above == PLAIN | set(fingerprint.MODULES)


def test_another_constant_is_another_key(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    for name in ("kernels/a.py", *fingerprint.MODULES):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(fingerprint, "PACKAGE", package)
    keys = {fingerprint.source_hash.__wrapped__()}
    for name in ("kernels/a.py", *fingerprint.MODULES):
        (tmp_path / name).write_text("ROW_BYTES = 1")
        keys.add(fingerprint.source_hash.__wrapped__())
    assert len(keys) == 2 + len(fingerprint.MODULES)
