"""How many clusters of every kind of sparse decode run at once, asked of the driver: JSON of (name, CTAs, clusters).

A process of its own, because it keeps machine code: the driver is asked about the very kernels, their registers and
shared memory included.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import cuda.bindings.driver as cuda
import torch

from dcp_decode.geometry import Geometry
from dcp_decode.kernels.sparse_config import EXCHANGE_CHUNKS
from dcp_decode.kernels.sparse_layout import DecodeConfig, sparse_config
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig


def kinds(geometry: Geometry) -> list[DecodeConfig]:
    """A kernel for every shape of cluster that a layout may choose; the largest CTAs of each."""
    warpgroups = [(32, 1, 256, 1), (16, 2, 256, 1), (16, 1, 256, 2), (16, 1, 256, 3), (16, 2, 256, 2), (32, 4, 256, 1)]
    warpgroups += [(16, 2, 256, 3), (16, 4, 256, 2), (32, 8, 256, 1)]
    exchanging = [
        sparse_config(geometry, 5, tiles=1, exchange="probabilities", groups=groups, chunk=chunk)
        for groups in (1, 2)
        for chunk in EXCHANGE_CHUNKS["probabilities"]
    ]
    return [*exchanging, *(WarpgroupConfig(geometry, 5, True, *size) for size in warpgroups)]


def clusters(code: bytes, config: DecodeConfig) -> int:
    """cuOccupancyMaxActiveClusters of a kernel's machine code as `config` launches it."""
    module = _value(cuda.cuModuleLoadData(code))
    (function,) = _value(cuda.cuModuleEnumerateFunctions(1, module))
    limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _value(cuda.cuFuncSetAttribute(function, limit, config.shared_bytes))
    launch = cuda.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = config.grid
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = config.threads, 1, 1
    launch.sharedMemBytes = config.shared_bytes
    shape = cuda.CUlaunchAttribute()
    shape.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimensions = shape.value.clusterDim
    dimensions.x, dimensions.y, dimensions.z = config.cluster
    launch.attrs, launch.numAttrs = [shape], 1
    return int(_value(cuda.cuOccupancyMaxActiveClusters(function, launch)))


def _value(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(error))
    return values[0] if values else None


def main() -> None:
    torch.zeros(1, device="cuda")  # makes the context
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
        from dcp_decode.kernels.sparse import compile_sparse

        found = [
            (
                config.name,
                config.cluster[0] * config.cluster[1],
                clusters(compile_sparse(config).function.__cubin__, config),
            )
            for config in kinds(Geometry(capacity=5))
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
