"""Compiled kernels kept on disk: what is found again, what is compiled anew, and processes that meet there."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from cutlass.cutlass_dsl import CuTeDSL

from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.geometry import Geometry
from dcp_decode.kernels import disk_cache
from dcp_decode.kernels.configs import QueryConfig
from dcp_decode.kernels.query import DcpQuery, example_arguments

KEY = "a" * 64
PROCESSES = 8
ROUNDS = 50
# 64 KB, so that a file that is written in place would be seen half written.
CONTENTS = [bytes([number]) * 65536 for number in range(PROCESSES)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("CUTE_DSL_KEEP", raising=False)
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", "sm_90a")
    return tmp_path


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with every call of the compiler."""
    compiled: list[object] = []
    compile_function = disk_cache.cute.compile

    def counted(kernel: object, *arguments: object) -> object:
        compiled.append(kernel)
        return compile_function(kernel, *arguments)

    monkeypatch.setattr(disk_cache.cute, "compile", counted)
    return compiled


def compile_query(**choices: object) -> disk_cache.JitKernel:
    return disk_cache.compile_kernel(DcpQuery(QueryConfig(Geometry(), 1, **choices)), example_arguments())


def assert_launches(kernel: disk_cache.JitKernel) -> None:
    """As far as a machine with no GPU lets it: arguments are taken, and the driver refuses."""
    if not torch.cuda.is_available():  # the addresses are made up
        with pytest.raises(Exception, match=r"cudaErrorInsufficientDriver|cudaErrorNoDevice"):
            kernel(16, 16, 0, 16, 1.0, 0)


def test_a_second_use_loads_and_a_damaged_entry_is_rebuilt(folder, compilations):
    assert_launches(compile_query())
    (entry,) = folder.iterdir()
    assert_launches(compile_query())
    assert len(compilations) == 1
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1])
    compile_query()
    assert len(compilations) == 2
    (rebuilt,) = folder.iterdir()
    assert disk_cache._find(folder, rebuilt.name.split(".")[0]) == rebuilt
    compile_query()
    assert len(compilations) == 2


def test_whatever_shapes_the_code_is_in_the_key(folder, monkeypatch):
    kernel = DcpQuery(QueryConfig(Geometry(), 1))
    keys = [disk_cache._key(kernel), disk_cache._key(DcpQuery(QueryConfig(Geometry(), 2)))]
    for patch in (
        lambda: monkeypatch.setattr(disk_cache, "source_hash", lambda: "another"),
        lambda: monkeypatch.setattr(disk_cache, "compiler_versions", dict),
        lambda: monkeypatch.setattr(CuTeDSL._get_dsl().envar, "arch", "sm_100a"),
        lambda: monkeypatch.setenv("CUTE_DSL_LINEINFO", "1"),
    ):
        patch()
        keys.append(disk_cache._key(kernel))
    assert len(set(keys)) == len(keys) == 6


def meet(folder: Path, number: int, start) -> None:
    start.wait()
    for _ in range(ROUNDS):
        disk_cache._keep(folder, KEY, CONTENTS[number])
        found = disk_cache._find(folder, KEY)
        assert found is not None
        assert found.read_bytes() in CONTENTS


def test_processes_that_keep_one_kernel_at_once_see_whole_entries(folder):
    context = multiprocessing.get_context("fork")
    start = context.Event()
    processes = [context.Process(target=meet, args=(folder, number, start)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    # Nobody took another's entry for damaged, and no part was left.
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        disk_cache._entry_name(KEY, content) for content in CONTENTS
    )


def test_a_folder_without_room_keeps_nothing_and_ends_no_run(folder, compilations, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENTS[0]) // 2, limits[1]))  # a file ends half way
    try:
        disk_cache._keep(folder, KEY, CONTENTS[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(folder.iterdir())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(disk_cache.tempfile, "mkstemp", refuse)
    assert_launches(compile_query())
    assert len(compilations) == 1


def test_nothing_is_kept_where_nothing_shall_be(folder, compilations, monkeypatch):
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, "")
    compile_query(pdl=False)
    compile_query(pdl=False)
    assert len(compilations) == 2
    assert not list(folder.iterdir())


def test_the_folder_is_the_variables_else_the_users_cache(folder, monkeypatch):
    assert disk_cache.cache_folder() == folder
    monkeypatch.delenv(disk_cache.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    assert disk_cache.cache_folder() == folder / "cache" / "dcp_decode" / "kernels"
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert disk_cache.cache_folder() is None
    monkeypatch.setenv(disk_cache.FOLDER_VARIABLE, str(folder / "file"))
    with pytest.raises(UnsupportedEnvironment, match=r"DCP_DECODE_KERNEL_CACHE = .*file.*must be a folder"):
        disk_cache.cache_folder()
