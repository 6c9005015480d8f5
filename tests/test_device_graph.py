"""The graph of a step as the driver is asked for it, without a driver: what lies in what, and refusals."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from dcp_decode import device_graph
from dcp_decode.errors import UnsupportedEnvironment

STREAM = SimpleNamespace(cuda_stream=77)
CAPTURED = 1001
NOT_SUPPORTED = 801
REFUSED = [
    "cuGraphConditionalHandleCreate",
    "cuGraphAddNode",
    "cuGraphAddChildGraphNode",
    "cuGraphInstantiateWithFlags",
]


class Driver:
    """Hands out handles 1, 2, ... and notes what is built: (kind, graph that it lies in, child graph) a node."""

    def __init__(self, refuses: str = "", lacks: str = "") -> None:
        self.refuses = refuses
        self.lacks = lacks
        self.handles = 0
        self.graph = self.executable = 0
        self.bodies = (ctypes.c_void_p * 1)()
        self.nodes: list[tuple[str, int, int | None]] = []
        self.condition: tuple[int, int] | None = None
        self.destroyed: list[int] = []
        self.launched: list[tuple[int, int]] = []

    def __getattr__(self, name: str):
        if name == self.lacks:
            raise AttributeError(f"undefined symbol: {name}")  # as ctypes does
        return self._refuse if name == self.refuses else getattr(type(self), f"_{name}").__get__(self)

    def _refuse(self, *arguments) -> int:
        return NOT_SUPPORTED

    def _new(self, handle=None) -> int:
        self.handles += 1
        if handle is not None:
            handle._obj.value = self.handles
        return self.handles

    def _cuGetErrorName(self, status, text) -> int:
        text._obj.value = b"CUDA_ERROR_NOT_SUPPORTED" if status == NOT_SUPPORTED else b"CUDA_SUCCESS"
        return 0

    def _cuCtxGetCurrent(self, context) -> int:
        self._new(context)
        return 0

    def _cuGraphCreate(self, graph, flags) -> int:
        self.graph = self._new(graph)
        return 0

    def _cuGraphConditionalHandleCreate(self, handle, graph, context, value, flags) -> int:
        self._new(handle)
        self.condition = (value.value, flags.value)
        return 0

    def _cuGraphAddNode(self, node, graph, before, count, parameters) -> int:
        parameters = parameters._obj
        assert (parameters.type, parameters.of_kind.conditional.size, count.value) == (13, 1, 0)
        self._new(node)
        self.bodies[0] = self._new()
        parameters.of_kind.conditional.bodies = ctypes.cast(self.bodies, ctypes.POINTER(ctypes.c_void_p))
        self.nodes.append(("if", graph.value, None))
        return 0

    def _cuGraphAddChildGraphNode(self, node, graph, before, count, child) -> int:
        self._new(node)
        self.nodes.append(("child", graph.value, child.value))
        return 0

    def _cuGraphAddEmptyNode(self, node, graph, before, count) -> int:
        self._new(node)
        self.nodes.append(("empty", graph.value, None))
        return 0

    def _cuGraphInstantiateWithFlags(self, executable, graph, flags) -> int:
        self.executable = self._new(executable)
        return 0

    def _cuGraphDestroy(self, graph) -> int:
        self.destroyed.append(graph.value)
        return 0

    def _cuGraphExecDestroy(self, executable) -> int:
        self.destroyed.append(executable.value)
        return 0

    def _cuGraphLaunch(self, executable, stream) -> int:
        self.launched.append((executable.value, stream.value))
        return 0


def build(monkeypatch, driver: Driver) -> device_graph.StepGraph:
    monkeypatch.setattr(device_graph, "_driver", lambda: driver)
    return device_graph.StepGraph(SimpleNamespace(raw_cuda_graph=lambda: CAPTURED), STREAM)


def test_the_step_is_the_body_of_the_one_node(monkeypatch):
    driver = Driver()
    graph = build(monkeypatch, driver)
    assert driver.nodes == [("if", driver.graph, None), ("child", driver.bodies[0], CAPTURED)]
    assert driver.condition == (1, 1)  # taken, and so again at every launch
    assert driver.destroyed == [driver.graph]
    graph.replay()
    graph.replay()
    assert driver.launched == [(driver.executable, STREAM.cuda_stream)] * 2
    del graph
    assert driver.destroyed == [driver.graph, driver.executable]


def test_a_graph_of_nothing_is_launched_as_a_step_is(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(device_graph, "_driver", lambda: driver)
    device_graph.StepGraph(None, STREAM).replay()
    assert driver.nodes == [("if", driver.graph, None), ("empty", driver.bodies[0], None)]
    assert driver.launched == [(driver.executable, STREAM.cuda_stream)]


def test_parameters_have_the_size_that_the_driver_reads():
    assert ctypes.sizeof(device_graph._NodeParameters) == 256


@pytest.mark.parametrize("function", REFUSED)
def test_a_driver_that_refuses_is_named(monkeypatch, function):
    driver = Driver(refuses=function)
    with pytest.raises(UnsupportedEnvironment, match=f"conditional nodes, but {function}: CUDA_ERROR_NOT_SUPPORTED"):
        build(monkeypatch, driver)
    assert driver.destroyed == [driver.graph]


def test_a_driver_too_old_for_conditional_nodes_is_refused(monkeypatch):
    driver = Driver(lacks="cuGraphConditionalHandleCreate")
    with pytest.raises(UnsupportedEnvironment, match="cuGraphConditionalHandleCreate: not in this driver"):
        build(monkeypatch, driver)
    assert driver.destroyed == [driver.graph]


def test_a_launch_that_fails_is_no_silent_step(monkeypatch):
    driver = Driver()
    graph = build(monkeypatch, driver)
    graph._launch = driver._refuse
    with pytest.raises(RuntimeError, match="cuGraphLaunch: CUDA_ERROR_NOT_SUPPORTED"):
        graph.replay()
