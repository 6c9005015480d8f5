"""Compiles kernel variants for one architecture without a GPU and prints their resources and instructions as JSON.

`CUTE_DSL_ARCH=sm_90a python tests/kernel_resources.py` for one architecture; `--update` rewrites the committed table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
TABLE = Path(__file__).parent / "data" / "kernel_resources.json"
SM_REGISTERS, SM_SHARED, SM_THREADS, SM_CTAS, RESERVED_SHARED = 65536, 228 * 1024, 2048, 32, 1024
INSTRUCTIONS = (
    "griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.relaxed.sys.global.v4", "st.relaxed.sys.global.v4",
    "fence.acq_rel.sys", "cp.async.bulk.shared::cluster.global", "cp.async.bulk.shared::cluster.shared::cta",
    "st.async", "mbarrier.try_wait", "cvt.rn.satfinite.e4m3x2.f32", "ld.local", "st.local",
)  # fmt: skip


def tool() -> Path | None:
    """cuobjdump of the package nvidia-cuda-cuobjdump, or None."""
    found = [Path(folder) / "nvidia/cu13/bin/cuobjdump" for folder in sys.path]
    return next((path for path in found if path.exists()), None)


def compile_all() -> dict[str, dict]:
    """Variant -> registers, stack, local, shared bytes, resident CTAs and the PTX instructions that occur."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": folder}
        from dcp_decode.geometry import Geometry
        from dcp_decode.kernels import query, sparse, sparse_config, value
        from dcp_decode.kernels.configs import QueryConfig, ValueConfig

        g = Geometry(capacity=5)
        made = {
            "query_push": (query.compile_query(QueryConfig(g, 5)), QueryConfig.threads, 0),
            "merge_push": (value.compile_value(ValueConfig(g, 5)), ValueConfig.threads, 0),
            "merge_local": (value.compile_value(ValueConfig(g, 5, push=False)), ValueConfig.threads, 0),
            "value_push": (value.compile_value_push(ValueConfig(g, 5, push=False)), ValueConfig.threads, 0),
        }
        for push in (True, False):
            for tiles in (1, 2, 3):
                for bulk in (False, True):
                    config = sparse_config.sparse_config(g, 5, push, tiles=tiles, bulk=bulk)
                    threads = getattr(config, "threads", None) or sparse_config.THREADS
                    made[config.name] = (sparse.compile_sparse(config), threads, config.shared.nbytes)
        return {name: describe(*entry) for name, entry in made.items()}


def describe(kernel: object, threads: int, dynamic_shared: int) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.function.__cubin__)
        cubin.flush()
        command = [str(tool()), "-res-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    shared = fields["SHARED"] + dynamic_shared
    by_registers = SM_REGISTERS // ((fields["REG"] + 7) // 8 * 8 * 32) // (threads // 32)
    resident = min(SM_CTAS, SM_THREADS // threads, by_registers, SM_SHARED // (shared + RESERVED_SHARED))
    return {
        "registers": fields["REG"],
        "stack_bytes": fields["STACK"],
        "local_bytes": fields["LOCAL"],
        "shared_bytes": shared,
        "threads": threads,
        "resident_ctas": resident,
        "instructions": [name for name in INSTRUCTIONS if name in kernel.function.__ptx__],
    }


def of_architecture(architecture: str) -> dict[str, dict]:
    """`compile_all` in a process of its own: the architecture of a DSL is fixed when it is imported."""
    environment = os.environ | {"CUTE_DSL_ARCH": architecture}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if "--update" in sys.argv:
        TABLE.write_text(json.dumps({name: of_architecture(name) for name in ARCHITECTURES}, indent=1) + "\n")
    else:
        print(json.dumps(compile_all()))
