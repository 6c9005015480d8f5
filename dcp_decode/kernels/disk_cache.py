"""Compiles kernels, and keeps what it compiled on disk: a second process loads in milliseconds what the first compiled.

    key  = SHA-256 of (kernel, configuration, source hash, architecture, versions, settings of the DSL)
    file = FOLDER/<key>.<SHA-256 of its bytes>.o

The CuTe DSL keeps no compiled function on disk for `cute.compile` (4.8.1: its cache is off for "compile only"), but
exports one as an object file and loads it again; this is those two calls and a name. An entry appears by an atomic
rename, so any number of processes may compile the same kernel at once; one whose bytes differ from its name is removed
and compiled again. FOLDER is the environment variable DCP_DECODE_KERNEL_CACHE (empty: nothing is kept), else
$XDG_CACHE_HOME/dcp_decode/kernels, by default under ~/.cache; it may be deleted at any time, and keeps nothing where
it has no room.

Measured (two shared cores, sm_90a, five kernels of a batch, best of three): compiled 1.2 s, compiled and kept
1.5 s, loaded again 16 ms; opened as a library built ahead of time, its SHA-256 checked: 3 ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.runtime import load_module, make_fake_stream
from cutlass.cutlass_dsl import CuTeDSL

from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.kernels.fingerprint import source_hash

FOLDER_VARIABLE = "DCP_DECODE_KERNEL_CACHE"
SYMBOL = "kernel"  # prefix of the symbols of an entry


class JitKernel:
    """A function of the CuTe DSL as a `launch.Kernel`: plain numbers, the stream's handle last."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *arguments: int | float) -> None:
        self.function(*arguments[:-1], cuda.CUstream(arguments[-1]))


def compile_kernel(kernel: Any, arguments: tuple[Any, ...]) -> JitKernel:
    """The compiled `kernel` (an object with `config`, launched by its `__call__`), from the cache if it is there.

    arguments: typed examples of those of `__call__`, without the stream. The architecture compiled for is that of the
    CuTe DSL (`CUTE_DSL_ARCH`, else the device's).
    """
    folder = cache_folder()
    if folder is None:
        return JitKernel(cute.compile(kernel, *arguments, make_fake_stream()))
    key = _key(kernel)
    found = _find(folder, key)
    if found is None:
        function = cute.compile(kernel, *arguments, make_fake_stream())
        _keep(folder, key, function.dump_to_object(SYMBOL))
        return JitKernel(function)
    return JitKernel(load_module(str(found))[SYMBOL])


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None: nowhere. Raises UnsupportedEnvironment if it can't be written."""
    given = os.environ.get(FOLDER_VARIABLE)
    # Artifacts (`CUTE_DSL_KEEP`) come from compilation only.
    if given == "" or os.environ.get("CUTE_DSL_KEEP"):
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "dcp_decode" / "kernels" if given is None else Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        if given is None:  # no home, or a read-only one: nobody asked for a cache
            return None
        message = f"{FOLDER_VARIABLE} = {given!r}: must be a folder that can be written, or empty ({error.strerror})"
        raise UnsupportedEnvironment(message) from None
    return folder


def compiler_versions() -> dict[str, str]:
    """Versions that decide what the CuTe DSL makes of a kernel."""
    return {
        "nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl"),
        "cuda": f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}",
        "python": platform.python_version(),
    }


def architecture() -> str:
    """What the CuTe DSL of this process compiles for."""
    return str(CuTeDSL._get_dsl().envar.arch)


def _key(kernel: Any) -> str:
    parts = {
        "kernel": type(kernel).__qualname__,
        "config": repr(kernel.config),
        "source": source_hash(),
        "architecture": architecture(),
        "versions": compiler_versions(),
        "settings": {name: value for name, value in os.environ.items() if name.startswith("CUTE_DSL_")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _find(folder: Path, key: str) -> Path | None:
    for path in folder.glob(f"{key}.*.o"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            if path.name == _entry_name(key, path.read_bytes()):
                return path
            path.unlink()
    return None


def _keep(folder: Path, key: str, content: bytes) -> None:
    """Make an entry, if the folder has room for it: the kernel is compiled and runs all the same."""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(".partial", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as partial:
                partial.write(content)
            os.replace(name, folder / _entry_name(key, content))
        finally:
            Path(name).unlink(missing_ok=True)


def _entry_name(key: str, content: bytes) -> str:
    return f"{key}.{hashlib.sha256(content).hexdigest()}.o"
