"""Kernels built ahead of time: the manifest of a build, and its libraries as launchable kernels. No cutlass.

    DIR/manifest.json              what was built, for what, from which sources, and the SHA-256 of every library
    DIR/dcp_decode_sm_90a.so       all kernels of one architecture, with their cubins and the CUDA runtime
    DIR/dcp_decode_kernels.h       their C interface

A build is used only if it is whole and made for exactly this: the same sources (`fingerprint`), geometry and route, an
architecture that is this GPU's, the batch sizes that will be asked for. Everything else is refused by name.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from dcp_decode import __version__
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.geometry import Geometry
from dcp_decode.inputs import read_input
from dcp_decode.kernels.configs import KernelConfig
from dcp_decode.kernels.fingerprint import source_hash
from dcp_decode.kernels.launch import Kernel, LoadKernel
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES, architecture_name

KEY = "parallel.kernels"
MANIFEST = "manifest.json"
HEADER = "dcp_decode_kernels.h"
ERROR_TEXT = "dcp_error_text"  # int32 -> const char *: what a status means
LOAD_SUFFIX = "_load"  # of the function that makes a kernel ready on the current device
# C type -> how Python passes it.
C_TYPES: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "float": ctypes.c_float,
    "void *": ctypes.c_void_p,
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LibraryFile(_Part):
    """One library: its file name in the folder, and the SHA-256 of its bytes."""

    file: str
    sha256: str


class BuiltKernel(_Part):
    """One kernel of a library: its C symbol, what it is specialised for, its C parameters (type, name)."""

    architecture: str
    symbol: str
    kernel: str
    batch: int
    config: dict[str, Any]
    parameters: list[tuple[Literal["int64_t", "int32_t", "float", "void *"], str]]


class Manifest(_Part):
    """`manifest.json`: libraries by architecture; versions: of what compiled and linked them."""

    schema_version: Literal[2] = 2
    dcp_decode: str
    commit: str | None
    dirty: bool | None
    source: str
    route: Literal["push", "local"]
    geometry: dict[str, int | float]
    versions: dict[str, str]
    libraries: dict[str, LibraryFile]
    kernels: list[BuiltKernel]


def open_kernels(
    folder: Path | None, geometry: Geometry, push: bool, batches: Iterable[int], device: torch.device
) -> LoadKernel:
    """Where a run takes its kernels from: the build in `folder` (None: compiled when first needed).

    batches: every B that may be asked for. Raises UnsupportedEnvironment on a GPU that the kernels are not for,
    ConfigError when the build is not for this run and this GPU.
    """
    architecture = architecture_of(device)
    if folder is None:
        from dcp_decode.kernels.jit import load_kernel  # imports cutlass

        return load_kernel
    return KernelLibrary(folder, geometry, push, batches, architecture).load


def architecture_of(device: torch.device) -> str:
    """The architecture that a GPU's kernels are compiled for. Raises UnsupportedEnvironment."""
    name = architecture_name(torch.cuda.get_device_capability(device))
    if name not in ARCHITECTURES:
        raise UnsupportedEnvironment(f"GPU architecture {name}: must be one of {', '.join(ARCHITECTURES)}")
    return name


class KernelLibrary:
    """The kernels of a build for one architecture, on the current CUDA device. Refuses as `open_kernels` says."""

    def __init__(self, folder: Path, geometry: Geometry, push: bool, batches: Iterable[int], architecture: str) -> None:
        self.folder = folder
        self.architecture = architecture
        self.manifest, library = check_build(folder, geometry, push, batches, architecture)
        self._library = ctypes.CDLL(str(library))
        self._error_text = self._library[ERROR_TEXT]
        self._error_text.restype = ctypes.c_char_p
        self._loaded: dict[str, Kernel] = {}

    def load(self, name: str, config: KernelConfig) -> Kernel:
        """The kernel `name` of a configuration (`launch.LoadKernel`)."""
        built = self._find(name, config)
        if built.symbol not in self._loaded:
            self._raise_on(self._library[built.symbol + LOAD_SUFFIX](), f"loading {built.symbol}")
            self._loaded[built.symbol] = self._kernel(built)
        return self._loaded[built.symbol]

    def _find(self, name: str, config: KernelConfig) -> BuiltKernel:
        wanted = static_choices(config)
        asked = (self.architecture, name, config.batch)
        of_batch = [one for one in self.manifest.kernels if (one.architecture, one.kernel, one.batch) == asked]
        for built in of_batch:
            if built.config == wanted:
                return built
        have = "; ".join(str(built.config) for built in of_batch) or "nothing"
        raise ConfigError(KEY, str(self.folder), f"holds no {name} for batch {config.batch}, {wanted}; it has {have}")

    def _kernel(self, built: BuiltKernel) -> Kernel:
        function = self._library[built.symbol]
        function.argtypes = [C_TYPES[kind] for kind, _ in built.parameters]

        def launch(*arguments: int | float) -> None:
            status = function(*arguments)
            if status:
                self._raise_on(status, f"launching {built.symbol}")

        return launch

    def _raise_on(self, status: int, doing: str) -> None:
        if status:
            raise UnsupportedEnvironment(f"{doing}: CUDA error {status} ({self._error_text(status).decode()})")


def static_choices(config: Any) -> dict[str, Any]:
    """What a configuration specialises a kernel for besides the geometry; a chain's holds that of its decode."""
    return _without_geometry(dataclasses.asdict(config))


def _without_geometry(choices: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_geometry(value) if isinstance(value, dict) else value
        for name, value in choices.items()
        if name != "geometry"
    }


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a build. Raises ConfigError."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(read_input(path))
    except OSError as error:
        reason = f"{MANIFEST} can't be read: {error.strerror}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = f"{MANIFEST} is damaged: {where + ': ' if where else ''}{first['msg']}"
    raise ConfigError(KEY, str(folder), f"must be a folder that `dcp-decode build` wrote; its {reason}")


def check_build(
    folder: Path, geometry: Geometry, push: bool, batches: Iterable[int], architecture: str
) -> tuple[Manifest, Path]:
    """The manifest and the library of a build that is whole and made for exactly this. Raises ConfigError."""
    manifest = read_manifest(folder)
    _check_purpose(folder, manifest, geometry, push, batches)
    return manifest, _checked_file(folder, manifest, architecture)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check_purpose(folder: Path, manifest: Manifest, geometry: Geometry, push: bool, batches: Iterable[int]) -> None:
    expected: dict[str, tuple[object, object]] = {
        "dcp_decode": (manifest.dcp_decode, __version__),
        "source": (manifest.source, source_hash()),
        "route": (manifest.route, "push" if push else "local"),
    }
    for name, value in dataclasses.asdict(geometry).items():
        expected[f"geometry.{name}"] = (manifest.geometry.get(name), value)
    for name, (found, wanted) in expected.items():
        if found != wanted:
            allowed = f"was built for {name} = {found!r}, must be {wanted!r}: build it again"
            raise ConfigError(KEY, str(folder), allowed)
    built = sorted({kernel.batch for kernel in manifest.kernels})
    missing = sorted(set(batches).difference(built))
    if missing:
        listed = ", ".join(map(str, built))
        allowed = f"was built for batches {listed}, batch {missing[0]} is needed too: build it again"
        raise ConfigError(KEY, str(folder), allowed)


def _checked_file(folder: Path, manifest: Manifest, architecture: str) -> Path:
    """The library of an architecture, once its bytes are those that were built."""
    if architecture not in manifest.libraries:
        listed = ", ".join(sorted(manifest.libraries))
        raise ConfigError(KEY, str(folder), f"was built for {listed}, and this GPU is {architecture}: build it again")
    library = manifest.libraries[architecture]
    path = folder / library.file
    found = file_hash(path) if path.is_file() else "no file"
    if found != library.sha256:
        allowed = f"{library.file} is damaged: SHA-256 {found}, must be {library.sha256}: build it again"
        raise ConfigError(KEY, str(folder), allowed)
    return path
