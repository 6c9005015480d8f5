"""Compiles every kernel variant without a GPU and tells what it needs and which instructions it holds.

`CUTE_DSL_ARCH=sm_90a python tests/kernel_resources.py` prints JSON for one architecture; `--update` rewrites the
committed table. To add a variant, add a line to `variants`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.chain_config import chain_config
from dcp_decode.kernels.configs import KernelConfig, stage_kernels
from dcp_decode.kernels.sparse_config import EXCHANGES, QUERY_WARPS, SparseConfig
from dcp_decode.kernels.sparse_layout import refuse_architecture, sparse_config
from dcp_decode.kernels.sparse_refusal import ARCHITECTURES
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig

CONTROL = "crowded"  # a variant that must spill; not in the table
TABLE = Path(__file__).parent / "data" / "kernel_resources.json"
SM_REGISTERS, SM_SHARED, SM_THREADS, SM_CTAS, RESERVED_SHARED = 65536, 228 * 1024, 2048, 32, 1024
# What matters, in PTX and in the machine code that comes of it.
INSTRUCTIONS = {
    "dependency wait": (r"griddepcontrol\.wait", r"ACQBULK"),
    "dependent launch": (r"griddepcontrol\.launch_dependents", r"PREEXIT"),
    "system load": (r"ld\.relaxed\.sys\.global\.v4", r"LDG\.E\.128\.STRONG\.SYS"),
    "system store": (r"st\.relaxed\.sys\.global\.v4", r"STG\.E\.128\.STRONG\.SYS"),
    "system fence": (r"fence\.acq_rel\.sys", r"MEMBAR\.ALL\.SYS"),
    "bulk load": (r"cp\.async\.bulk\.shared::cluster\.global", r"UBLKCP\.S\.G"),
    "bulk peer copy": (r"cp\.async\.bulk\.shared::cluster\.shared::cta", r"UBLKCP\.S\.S"),
    "peer store": (r"st\.async", r"STAS"),
    "barrier wait": (r"mbarrier\.try_wait", r"SYNCS\.PHASECHK"),
    "cluster barrier": (r"barrier\.cluster\.arrive", r"UCGABAR_ARV"),
    "matrix load": (r"ldmatrix", r"LDSM"),
    "unpack E4M3": (r"cvt\.rn\.f16x2\.e4m3x2", r"F2FP\.F16\.E4M3\.UNPACK_B"),
    "pack E4M3": (r"cvt\.rn\.satfinite\.e4m3x2\.f32", r"F2FP\.SATFINITE\.E4M3\.F32"),
    "tensor core": (r"mma\.sync\.aligned\.m16n8k16", r"HMMA\.16816\.F32"),
    "warpgroup product": (r"wgmma\.mma_async", r"HGMMA"),
    "matrix store": (r"stmatrix", r"STSM"),
    "rotation": (r"shf\.r\.wrap", r"SHF\.R\.W"),
}
# Heads of a CTA, CTAs that share a row's keys, keys of a chunk, head groups of a cluster.
WARPGROUP_SIZES = (
    (32, 1, 256, 1), (32, 8, 256, 1), (24, 2, 256, 1), (24, 4, 128, 2), (16, 1, 256, 2), (16, 2, 128, 2),
    (16, 2, 256, 2), (16, 4, 64, 1), (16, 4, 256, 2), (8, 2, 256, 2),
)  # fmt: skip
LOCAL_MEMORY = re.compile(r"\b(?:LDL|STL)\b")


def variants(architecture: str) -> dict[str, tuple[str, KernelConfig]]:
    """Name in the table -> the kernel's name in `jit.COMPILERS` and its configuration."""
    g = Geometry(capacity=5)
    push, local = (stage_kernels(g, 5, route, architecture) for route in (True, False))
    found = {name: (name, local[name]) for name in ("topk_push", "topk_receive", "query_push", "value_push", "digest")}
    found |= {"merge_push": ("merge", push["merge"]), "merge_local": ("merge", local["merge"])}
    sparse = [sparse_config(g, 5, route, tiles=tiles) for route in (True, False) for tiles in (1, 2, 3)]
    sparse += [sparse_config(g, 5, tiles=tiles, bulk=True) for tiles in (1, 2, 3)]
    sparse += [sparse_config(g, 5, tiles=tiles, exchange="probabilities") for tiles in (1, 2, 3)]
    sparse += [sparse_config(g, 5, route, tiles=1, exchange="probabilities", groups=2) for route in (True, False)]
    sparse += [sparse_config(g, 5, route, 1, exchange="probabilities", groups=2, chunk=128) for route in (True, False)]
    chains = [chain_config(g, 5, 256, exchange=exchange, groups=1) for exchange in EXCHANGES]
    chains += [chain_config(g, 5, keys) for keys in (256, 512)]
    found |= {config.name: ("chain", config) for config in chains}
    warpgroups = [WarpgroupConfig(g, 5, True, *size) for size in WARPGROUP_SIZES]
    warpgroups.append(WarpgroupConfig(g, 5, False, *WARPGROUP_SIZES[0]))
    runnable = [config for config in warpgroups if refuse_architecture(config, architecture) is None]
    return found | {config.name: ("sparse_decode", config) for config in (*sparse, *runnable)}


def tools() -> Path | None:
    """The folder of cuobjdump and nvdisasm, from their packages, or None."""
    found = [Path(folder) / "nvidia/cu13/bin" for folder in sys.path]
    return next((path for path in found if (path / "cuobjdump").exists() and (path / "nvdisasm").exists()), None)


def compile_all(chosen: dict[str, tuple[str, KernelConfig]]) -> dict[str, dict]:
    """Variant -> registers, stack and local bytes, shared bytes, resident CTAs, instructions."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": folder}
        from dcp_decode.kernels.jit import load_kernel

        return {
            name: describe(load_kernel(kernel, config).function, config) for name, (kernel, config) in chosen.items()
        }


class CrowdedConfig(SparseConfig):
    """Of the negative control: three tiles a CTA that also has query warps, and so 96 registers a thread."""

    query_warps = QUERY_WARPS


def describe(function: object, config: KernelConfig) -> dict:
    """Resources and instructions of one compiled function."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(function.__cubin__)
        cubin.flush()
        usage = _output("cuobjdump", "-res-usage", cubin.name)
        code = _output("nvdisasm", "-c", "-ndf", cubin.name)
    fields = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    shared = fields["SHARED"] + config.shared_bytes
    by_registers = SM_REGISTERS // ((fields["REG"] + 7) // 8 * 8 * 32) // (config.threads // 32)
    # ptxas counts the reserved bytes where a kernel has shared memory at all.
    occupied = max(shared, RESERVED_SHARED)
    resident = min(SM_CTAS, SM_THREADS // config.threads, by_registers, SM_SHARED // occupied)
    in_ptx = [name for name, (ptx, _) in INSTRUCTIONS.items() if re.search(ptx, function.__ptx__)]
    in_code = [name for name, (_, sass) in INSTRUCTIONS.items() if re.search(sass, code)]
    assert in_ptx == in_code, f"PTX {in_ptx}, machine code {in_code}"
    return {
        "registers": fields["REG"],
        "stack_bytes": fields["STACK"],
        "local_bytes": fields["LOCAL"],
        "local_accesses": len(LOCAL_MEMORY.findall(code)),
        "shared_bytes": shared,
        "threads": config.threads,
        "resident_ctas": resident,
        "instructions": in_code,
    }


def of_architecture(architecture: str) -> dict[str, dict]:
    """What this script prints in a process of its own: the architecture of a DSL is fixed when it is imported."""
    environment = os.environ | {"CUTE_DSL_ARCH": architecture}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def update_table() -> None:
    lines = []
    for architecture in ARCHITECTURES:
        found = of_architecture(architecture)
        del found[CONTROL]
        kernels = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
        lines.append(f" {json.dumps(architecture)}: {{\n" + ",\n".join(kernels) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _output(tool: str, *arguments: str) -> str:
    folder = tools()
    assert folder is not None
    return subprocess.run([folder / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if "--update" in sys.argv:
        update_table()
    else:
        crowded = CrowdedConfig(**vars(sparse_config(Geometry(capacity=5), 5, tiles=3)))
        chosen = variants(os.environ["CUTE_DSL_ARCH"]) | {CONTROL: ("sparse_decode", crowded)}
        print(json.dumps(compile_all(chosen)))
