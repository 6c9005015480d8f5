"""Builds kernels ahead of time: one shared library an architecture, and the manifest that `aot` checks.

    kernel --cute.compile--> host launcher and cubin, an object file --cc--> DIR/dcp_decode_sm_90a.so
                                                                              + C functions of this module

An architecture is compiled in a process of its own, since the CuTe DSL takes it from the environment when it is
imported. A library holds everything but libc and the driver: linked in are `libcuda_dialect_runtime_static.a` of
nvidia-cutlass-dsl and `libcudart_static.a` of nvidia-cuda-runtime, whose major version the driver must know (13.0:
driver 580 or later). No CUDA header and no CUDA toolkit of the system is used; `cc` (or $CC) compiles and links.

Symbols other than the C functions stay local to the library, so it can live beside another CUDA runtime, as torch's.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dcp_decode import __version__, environment
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.aot import (
    ERROR_TEXT,
    HEADER,
    LOAD_SUFFIX,
    MANIFEST,
    BuiltKernel,
    LibraryFile,
    Manifest,
    file_hash,
    static_choices,
)
from dcp_decode.kernels.chain_config import step_kernels
from dcp_decode.kernels.configs import KernelConfig
from dcp_decode.kernels.fingerprint import source_hash
from dcp_decode.kernels.sparse_layout import sparse_for
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES, SparseRefused

CUDA_RUNTIME = "nvidia-cuda-runtime"
LINK_SECONDS = 120

# The launcher that the CuTe DSL exports takes pointers to its arguments, then one to its status.
PROLOGUE = f"""#include "{HEADER}"
#include <stddef.h>

extern int32_t cudaGetDevice(int32_t *device);
extern const char *cudaGetErrorString(int32_t status);
typedef void entry(void **arguments);

const char *{ERROR_TEXT}(int32_t status) {{ return cudaGetErrorString(status); }}

static int32_t load(entry *initialize, entry *load_to_device, void **module) {{
    int32_t device = 0, status = cudaGetDevice(&device);
    void *initial[] = {{&module, &status}}, *loading[] = {{&module, &device, &status}};
    if (status == 0 && *module == NULL) initialize(initial);
    if (status == 0) load_to_device(loading);
    return status;
}}
"""
FUNCTIONS = f"""
extern entry _mlir_%(symbol)s_cuda_init, _mlir_%(symbol)s_cuda_load_to_device;
extern void %(launcher)s(void **arguments, int32_t count);
static void *%(symbol)s_module;

int32_t %(symbol)s{LOAD_SUFFIX}(void) {{
    return load(_mlir_%(symbol)s_cuda_init, _mlir_%(symbol)s_cuda_load_to_device, &%(symbol)s_module);
}}

int32_t %(symbol)s(%(parameters)s) {{
    int32_t status = 0;
    void *arguments[] = {{%(addresses)s, &status}};
    %(launcher)s(arguments, sizeof arguments / sizeof *arguments);
    return status;
}}
"""
HEADER_TEXT = f"""/* Kernels of dcp_decode {__version__}, built ahead of time; manifest.json says for what.
 *
 * A function returns a CUDA status, 0 for success. Call NAME{LOAD_SUFFIX}() once a device, then NAME(..) to launch on a
 * stream of the current device; addresses are device addresses. No two threads may load at once.
 */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif
const char *{ERROR_TEXT}(int32_t status);
%s
#ifdef __cplusplus
}}
#endif
"""


@dataclasses.dataclass(frozen=True)
class _Built:
    """What the process of one architecture returns."""

    library: LibraryFile
    kernels: list[BuiltKernel]
    versions: dict[str, str]


def build(
    geometry: Geometry, push: bool, batches: Sequence[int], architectures: Sequence[str], output: Path
) -> Manifest:
    """Build the kernels of every batch B for every architecture into the folder `output`, and write its manifest.

    push: the route. Raises ConfigError or SparseRefused for what a kernel refuses, UnsupportedEnvironment when the
    compiler, the linker or one of their packages is missing.
    """
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise ConfigError("--arch", architecture, f"must be one of {', '.join(ARCHITECTURES)}")
    configs = {name: [step_kernels(geometry, batch, push, name) for batch in batches] for name in architectures}
    for architecture, batch in itertools.product(architectures, batches):
        refusal = sparse_for(geometry, batch, push, architecture)
        if refusal is not None:
            raise SparseRefused(refusal)
    _linked_libraries()
    _make_folder(output)
    (output / MANIFEST).unlink(missing_ok=True)  # a build that breaks off leaves none
    workers = min(len(architectures), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [pool.submit(_build_architecture, name, configs[name], output) for name in architectures]
        built = [future.result() for future in futures]
    commit, dirty = environment.commit()
    manifest = Manifest(
        dcp_decode=__version__,
        commit=commit,
        dirty=dirty,
        source=source_hash(),
        route="push" if push else "local",
        geometry=dataclasses.asdict(geometry),
        versions=built[0].versions,
        libraries=dict(zip(architectures, (one.library for one in built), strict=True)),
        kernels=[kernel for one in built for kernel in one.kernels],
    )
    # The interface is the same for all architectures, but not every one has every kernel.
    every = {kernel.symbol: kernel for one in built for kernel in one.kernels}
    (output / HEADER).write_text(_header(every.values()))
    (output / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n")
    return manifest


def _build_architecture(architecture: str, configs: Sequence[dict[str, KernelConfig]], output: Path) -> _Built:
    """In a fresh process: compile, export and link all kernels for one architecture."""
    os.environ["CUTE_DSL_ARCH"] = architecture
    os.environ["DCP_DECODE_KERNEL_CACHE"] = ""  # what the cache returns can't be exported again
    from dcp_decode.kernels.disk_cache import compiler_versions

    name = f"dcp_decode_{architecture}.so"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        exported = [
            _export(architecture, kernel, config, folder) for of_batch in configs for kernel, config in of_batch.items()
        ]
        kernels = [built for built, _ in exported]
        (folder / HEADER).write_text(_header(kernels))
        (folder / "functions.c").write_text(PROLOGUE + "".join(functions for _, functions in exported))
        names = [ERROR_TEXT, *(symbol for built in kernels for symbol in (built.symbol, built.symbol + LOAD_SUFFIX))]
        (folder / "exported.map").write_text(f"{{ global: {'; '.join(names)}; local: *; }};")
        _link(folder, output / name)
    versions = compiler_versions() | {CUDA_RUNTIME: metadata.version(CUDA_RUNTIME)}
    return _Built(LibraryFile(file=name, sha256=file_hash(output / name)), kernels, versions)


def _export(architecture: str, kernel: str, config: KernelConfig, folder: Path) -> tuple[BuiltKernel, str]:
    """Compile a kernel into an object file of `folder`; its entry of the manifest, and its C functions."""
    from dcp_decode.kernels.jit import load_kernel  # imports cutlass

    symbol = f"dcp_{kernel}_b{config.batch}"
    load_kernel(kernel, config).function.export_to_c(str(folder), symbol)
    # Entry point and parameters are as the header declares them that the CuTe DSL exports beside the object.
    header = (folder / f"{symbol}.h").read_text()
    launcher = re.search(rf"void (_mlir_{symbol}__mlir_ciface_\w+)\(void \*\*args", header)
    wrapper = re.search(rf"cute_dsl_{symbol}_wrapper\({symbol}_Kernel_Module_t \*module, (.*)\) {{", header)
    if launcher is None or wrapper is None:
        raise UnsupportedEnvironment(f"nvidia-cutlass-dsl exports {symbol} in an unknown form")
    declared = wrapper[1].replace("cudaStream_t ", "void *")
    parameters: list[Any] = [(kind.strip(), name) for kind, name in re.findall(r"(\w+ \*|\w+ )(\w+)", declared)]
    addresses = ", ".join(f"&{name}" for _, name in parameters)
    functions = FUNCTIONS % {
        "symbol": symbol, "launcher": launcher[1], "parameters": declared, "addresses": addresses
    }  # fmt: skip
    choices = static_choices(config)
    built = BuiltKernel(
        architecture=architecture,
        symbol=symbol,
        kernel=kernel,
        batch=config.batch,
        config=choices,
        parameters=parameters,
    )
    return built, functions


def _header(kernels: Iterable[BuiltKernel]) -> str:
    lines = []
    for built in kernels:
        parameters = ", ".join(f"{kind}{'' if kind.endswith('*') else ' '}{name}" for kind, name in built.parameters)
        lines += [f"int32_t {built.symbol}{LOAD_SUFFIX}(void);", f"int32_t {built.symbol}({parameters});"]
    return HEADER_TEXT % "\n".join(lines)


def _link(folder: Path, library: Path) -> None:
    """All objects and `functions.c` of a folder into one library, which exports what `exported.map` lists."""
    objects = sorted(map(str, folder.glob("*.o")))
    command = [*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-O2", "-s", "-o", str(library)]
    command += [f"-Wl,--version-script={folder / 'exported.map'}", str(folder / "functions.c"), *objects]
    command += [*map(str, _linked_libraries()), "-ldl", "-lrt", "-lpthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LINK_SECONDS, check=False)
    except OSError as error:
        raise UnsupportedEnvironment(f"the C compiler {command[0]} can't be run: {error.strerror}; set CC") from None
    except subprocess.TimeoutExpired:
        raise UnsupportedEnvironment(f"{command[0]} did not link {library.name} within {LINK_SECONDS} s") from None
    if done.returncode:
        raise UnsupportedEnvironment(f"{command[0]} can't link {library.name}: {' '.join(done.stderr.split())[-1000:]}")


def _linked_libraries() -> tuple[Path, Path]:
    """The static libraries of the CuTe DSL and of the CUDA runtime, from the packages of this environment."""
    try:
        from cutlass.cute.export.aot_config import get_libdir

        runtime = Path(str(metadata.distribution(CUDA_RUNTIME).locate_file("nvidia/cu13/lib/libcudart_static.a")))
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise UnsupportedEnvironment(
            f"a build needs nvidia-cutlass-dsl and {CUDA_RUNTIME} (pip install 'dcp-decode[gpu]'): {error}"
        ) from None
    dialect = Path(get_libdir()) / "libcuda_dialect_runtime_static.a"
    for path in (dialect, runtime):
        if not path.is_file():
            raise UnsupportedEnvironment(f"a build links {path}: no such file")
    return dialect, runtime


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):  # before the minutes of compiling
            pass
    except OSError as error:
        raise ConfigError("--output", str(output), f"must be a folder to write to ({error.strerror})") from None
