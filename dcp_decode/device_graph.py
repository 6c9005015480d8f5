"""A verify step as one CUDA graph whose launch costs the host one node, however many nodes the step has.

    host: one launch of [ IF node, always taken ]
                             |
    device:                  +--> body: the captured step, its copies from and to the host too

Launching a graph costs the host time for its nodes: most of it to read again what a step's results have driven out of
its caches, and where a copy stands between kernels. The body of a conditional node is encoded when the graph is
instantiated, and launched by the device: the host never touches it.

Launches measured (H200 host, driver 580, us; cold: after 256 MB have been copied):

                                                    cold     hot
    1 kernel                                        28       7
    1600 kernels in a line                          43       12
    600 nodes in a line, every tenth a copy         189      123
    each of these as the body of an IF node         24..29   7..8

The driver is called by ctypes, since neither torch nor a machine that only launches has these functions.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache

import torch

from dcp_decode.errors import UnsupportedEnvironment

# Of cuda.h: these calls and structures are CUDA 12.4's, which later drivers keep.
NODE_TYPE_CONDITIONAL = 13
CONDITION_TYPE_IF = 0
ASSIGN_DEFAULT = 1  # the condition gets its default value at every launch
TAKEN = 1
NO_DEPENDENCIES = ctypes.c_size_t(0)


class _ConditionalParameters(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS; bodies: the driver's array of graphs to fill."""

    _fields_ = (
        ("handle", ctypes.c_uint64),
        ("type", ctypes.c_int),
        ("size", ctypes.c_uint),
        ("bodies", ctypes.POINTER(ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
    )


class _KindParameters(ctypes.Union):
    _fields_ = (("reserved", ctypes.c_longlong * 29), ("conditional", _ConditionalParameters))


class _NodeParameters(ctypes.Structure):
    """CUgraphNodeParams."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved_first", ctypes.c_int * 3),
        ("of_kind", _KindParameters),
        ("reserved_last", ctypes.c_longlong),
    )


class StepGraph:
    """captured: the step, with keep_graph=True; None: nothing. stream: the one that `replay` launches on.

    Raises UnsupportedEnvironment where the driver has no conditional nodes, or refuses a node of the body.
    """

    def __init__(self, captured: torch.cuda.CUDAGraph | None, stream: torch.cuda.Stream) -> None:
        self._captured = captured  # holds the memory of what was captured
        whole, node, executable = (ctypes.c_void_p() for _ in range(3))
        _call("cuGraphCreate", ctypes.byref(whole), 0)
        try:
            body = _add_always_taken(whole)
            if captured is None:
                _call("cuGraphAddEmptyNode", ctypes.byref(node), body, None, NO_DEPENDENCIES)
            else:
                step = ctypes.c_void_p(captured.raw_cuda_graph())
                _call("cuGraphAddChildGraphNode", ctypes.byref(node), body, None, NO_DEPENDENCIES, step)
            _call("cuGraphInstantiateWithFlags", ctypes.byref(executable), whole, ctypes.c_ulonglong(0))
        finally:
            _call("cuGraphDestroy", whole)
        weakref.finalize(self, _driver().cuGraphExecDestroy, executable)
        self._launch = _driver().cuGraphLaunch
        self._arguments = (executable, ctypes.c_void_p(stream.cuda_stream))

    def replay(self) -> None:
        """Launch the step once on its stream."""
        status = self._launch(*self._arguments)
        if status:
            raise RuntimeError(f"cuGraphLaunch: {_name(status)}")


def _add_always_taken(graph: ctypes.c_void_p) -> ctypes.c_void_p:
    """Add an IF node whose condition holds at every launch; its body, to be filled."""
    context, handle, node = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    condition = (ctypes.c_uint(TAKEN), ctypes.c_uint(ASSIGN_DEFAULT))
    _call("cuGraphConditionalHandleCreate", ctypes.byref(handle), graph, context, *condition)
    parameters = _NodeParameters(type=NODE_TYPE_CONDITIONAL)
    parameters.of_kind.conditional = _ConditionalParameters(handle.value, CONDITION_TYPE_IF, 1, None, context)
    _call("cuGraphAddNode", ctypes.byref(node), graph, None, NO_DEPENDENCIES, ctypes.byref(parameters))
    return ctypes.c_void_p(parameters.of_kind.conditional.bodies[0])


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: object) -> None:
    """Call the driver. Raises UnsupportedEnvironment if it refuses, or is too old to know the function."""
    try:
        call = getattr(_driver(), function)
    except AttributeError:
        reason = "not in this driver"
    else:
        status = call(*arguments)
        reason = _name(status) if status else ""
    if reason:
        needs = f"a step's graph needs conditional nodes, but {function}: {reason}"
        raise UnsupportedEnvironment(f"{needs}; parallel.execution = 'eager' needs none")


def _name(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"an unknown error").decode()
