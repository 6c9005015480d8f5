"""Kernels compiled just in time: which function compiles which kernel of `configs.stage_kernels`, or the chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_decode.kernels.chain import compile_chain
from dcp_decode.kernels.configs import KernelConfig
from dcp_decode.kernels.digest import compile_digest
from dcp_decode.kernels.disk_cache import JitKernel
from dcp_decode.kernels.exchange import compile_topk_push, compile_topk_receive
from dcp_decode.kernels.query import compile_query
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.value import compile_value, compile_value_push

COMPILERS: dict[str, Callable[[Any], JitKernel]] = {
    "topk_push": compile_topk_push,
    "topk_receive": compile_topk_receive,
    "query_push": compile_query,
    "sparse_decode": compile_sparse,
    "value_push": compile_value_push,
    "merge": compile_value,
    "digest": compile_digest,
    "chain": compile_chain,
}


def load_kernel(name: str, config: KernelConfig) -> JitKernel:
    """The kernel `name` of a configuration, for this process's GPU (`launch.LoadKernel`)."""
    return COMPILERS[name](config)
