"""Kernels built ahead of time: what a build writes, that it needs no cutlass, and what is refused, and why."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")

from dcp_decode.cli import run_command
from dcp_decode.config import load_config
from dcp_decode.device_rank import step_batches
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.kernels import build as builder
from dcp_decode.kernels.aot import HEADER, MANIFEST, KernelLibrary, open_kernels, read_manifest
from dcp_decode.kernels.chain_config import step_kernels
from dcp_decode.kernels.configs import ValueConfig
from dcp_decode.kernels.fingerprint import source_hash

pytestmark = pytest.mark.xdist_group("build")  # one worker: they share a build

BATCH = 1
ARCHITECTURE = "sm_90a"
CONFIG = """
[model]
topk = 64
[mailbox]
capacity = 2
[service]
draft_tokens = 0
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of the command, for one batch and one architecture."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "config.toml").write_text(CONFIG)
    options = ["--arch", ARCHITECTURE, "--config", str(folder / "config.toml"), "--output", str(folder / "kernels")]
    assert run_command(["build", *options, "--batches", str(BATCH)]) == 0
    return folder / "kernels"


@pytest.fixture
def geometry(built: Path):
    return load_config(built.parent / "config.toml").geometry()


def test_manifest_says_what_was_built_for_what(built, geometry):
    manifest = json.loads((built / MANIFEST).read_text())
    assert manifest["source"] == source_hash()
    assert manifest["geometry"]["topk"] == geometry.topk == 64
    assert manifest["versions"].keys() == {"nvidia-cutlass-dsl", "cuda", "python", "nvidia-cuda-runtime"}
    wanted = step_kernels(geometry, BATCH, True, ARCHITECTURE)
    assert {kernel["kernel"] for kernel in manifest["kernels"]} == wanted.keys()
    assert {kernel["architecture"] for kernel in manifest["kernels"]} == {ARCHITECTURE}
    symbols = [kernel["symbol"] for kernel in manifest["kernels"]]
    assert all(f"int32_t {symbol}(int64_t " in (built / HEADER).read_text() for symbol in symbols)
    # The CUDA runtime inside must not meet another one of the process, as torch's.
    library = ctypes.CDLL(str(built / "dcp_decode_sm_90a.so"))
    assert all(hasattr(library, symbol) for symbol in symbols)
    assert not hasattr(library, "cudaGetDevice")


# Runs with an import of cutlass or of the driver's Python bindings forbidden; 35: no GPU here (or 100: no device).
LAUNCH_WITHOUT_CUTLASS = """
import sys
sys.modules["cutlass"] = sys.modules["cuda"] = None
from pathlib import Path
from dcp_decode.config import load_config
from dcp_decode.errors import UnsupportedEnvironment
from dcp_decode.kernels import launch, stages
from dcp_decode.kernels.aot import KernelLibrary
from dcp_decode.kernels.chain_config import step_kernels
folder = Path(sys.argv[1])
geometry = load_config(folder.parent / "config.toml").geometry()
library = KernelLibrary(folder, geometry, True, [1], "sm_90a")
for name, config in step_kernels(geometry, 1, True, "sm_90a").items():
    try:
        library.load(name, config)
    except UnsupportedEnvironment as error:
        print(error)
"""


def test_a_library_needs_no_cutlass(built, geometry):
    command = [sys.executable, "-c", LAUNCH_WITHOUT_CUTLASS, str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"CUDA_VISIBLE_DEVICES": ""})
    expected = [f"loading dcp_{name}_b1: CUDA error " for name in step_kernels(geometry, BATCH, True, ARCHITECTURE)]
    assert all(line.startswith(text) for line, text in zip(done.stdout.splitlines(), expected, strict=True))


def test_every_kernel_is_found_and_no_other(built, geometry):
    library = KernelLibrary(built, geometry, True, [BATCH], "sm_90a")
    for name, config in step_kernels(geometry, BATCH, True, ARCHITECTURE).items():
        assert library._find(name, config).symbol == f"dcp_{name}_b1"
    with pytest.raises(ConfigError, match=r"holds no merge for batch 1, .*'pdl': False.* it has .*'pdl': True"):
        library.load("merge", ValueConfig(geometry, BATCH, pdl=False))
    with pytest.raises(ConfigError, match=r"holds no value_push for batch 1, .* it has nothing"):
        library.load("value_push", ValueConfig(geometry, BATCH, push=False))


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "kernels"))


def change_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


def assert_refused(folder, geometry, words, push=True, batches=(BATCH,), architecture="sm_90a"):
    with pytest.raises(ConfigError) as refusal:
        KernelLibrary(folder, geometry, push, batches, architecture)
    assert refusal.value.exit_code == 2
    message = str(refusal.value)
    assert message.startswith(f"parallel.kernels = {str(folder)!r}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_the_copy_itself_is_accepted(copied, geometry):
    KernelLibrary(copied, geometry, True, [BATCH], "sm_90a")


def test_stale_builds_are_refused(copied, geometry):
    change_manifest(copied, source="0" * 64)
    assert_refused(copied, geometry, ("source = '000", source_hash(), "build it again"))


def test_foreign_builds_are_refused(copied, geometry):
    wider = replace(geometry, heads=128, padded_heads=128)
    assert_refused(copied, wider, ("geometry.heads = 96", "must be 128"))
    assert_refused(copied, geometry, ("route = 'push'", "must be 'local'"), push=False)
    assert_refused(copied, geometry, ("built for sm_90a", "this GPU is sm_100a"), architecture="sm_100a")
    assert_refused(copied, geometry, ("built for batches 1", "batch 2 is needed"), batches=(1, 2))
    change_manifest(copied, dcp_decode="9.9")
    assert_refused(copied, geometry, ("dcp_decode = '9.9'",))


@pytest.mark.parametrize("folder", [None, Path("anywhere")], ids=["compiled", "built"])
def test_a_gpu_that_the_kernels_are_not_for_is_refused(folder, geometry, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    with pytest.raises(UnsupportedEnvironment, match="GPU architecture sm_120a: must be one of sm_90a, sm_100a"):
        open_kernels(folder, geometry, True, (BATCH,), torch.device("cuda", 0))


def test_damaged_libraries_are_refused(copied, geometry):
    library = copied / read_manifest(copied).libraries["sm_90a"].file
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    assert_refused(copied, geometry, (library.name, "damaged", "SHA-256"))
    library.unlink()
    assert_refused(copied, geometry, (library.name, "no file"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("can't be read", "No such file")),
        ("{", ("damaged", "Invalid JSON")),
        ("{}", ("damaged", "dcp_decode", "Field required")),
    ],
)
def test_damaged_manifests_are_refused(copied, geometry, text, words):
    (copied / MANIFEST).unlink()
    if text is not None:
        (copied / MANIFEST).write_text(text)
    assert_refused(copied, geometry, ("must be a folder that `dcp-decode build` wrote", *words))


def test_other_schemas_are_refused(copied, geometry):
    change_manifest(copied, schema_version=1)
    assert_refused(copied, geometry, ("schema_version", "Input should be 2"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arch", "sm_80"], ("--arch", "sm_80", "sm_90a, sm_100a, sm_103a")),
        (["--arch", ARCHITECTURE, "--batches", "five"], ("--batches", "five", "whole numbers")),
        (["--arch", ARCHITECTURE, "--output", "/proc"], ("--output", "/proc", "a folder to write to")),
        (["--arch", ARCHITECTURE, "--batches", "99"], ("batch", "99", "1 .. mailbox capacity 20")),
    ],
)
def test_bad_options_are_refused(options, words, tmp_path, capsys):
    assert run_command(["build", "--output", str(tmp_path / "kernels"), *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words)
    assert not (tmp_path / "kernels").exists()


def test_a_build_without_a_linker_is_refused_and_leaves_no_manifest(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    (tmp_path / "functions.c").write_text("")
    with pytest.raises(UnsupportedEnvironment, match="no-such-compiler can't be run"):
        builder._link(tmp_path, tmp_path / "library.so")
    monkeypatch.setenv("CC", "cc")
    (tmp_path / "functions.c").write_text("no C at all")
    with pytest.raises(UnsupportedEnvironment, match=r"cc can't link library.so: .*error"):
        builder._link(tmp_path, tmp_path / "library.so")
    monkeypatch.setenv("CC", "sh -c 'exec sleep 30'")
    monkeypatch.setattr(builder, "LINK_SECONDS", 0.2)
    with pytest.raises(UnsupportedEnvironment, match=r"sh did not link library.so within 0.2 s"):
        builder._link(tmp_path, tmp_path / "library.so")


def test_a_run_needs_the_batches_of_its_steps_and_of_its_needle_test():
    geometry = load_config(None, {"mailbox.capacity": 23}).geometry()
    assert step_batches(5, geometry) == (2, 5, 10, 20)
    assert step_batches(1, replace(geometry, capacity=1)) == (1,)
