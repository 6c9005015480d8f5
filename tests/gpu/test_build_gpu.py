"""Kernels built ahead of time on a GPU: a whole run without cutlass leaves the bits of compiled kernels."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("pydantic", reason="the service's config needs pydantic")

from dcp_decode.config import load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.device_rank import step_batches
from dcp_decode.errors import ConfigError, UnsupportedEnvironment
from dcp_decode.kernels import build as builder
from dcp_decode.kernels.aot import architecture_of, open_kernels
from dcp_decode.run import run_rank

pytestmark = pytest.mark.gpu

VALUES = {
    "parallel.device": "cuda",
    "parallel.fabric": "loopback",
    "model.layers": 3,
    "mailbox.capacity": 10,
    "service.max_steps": 8,
    "verify.mode": "sample",
}
RUN_WITHOUT_CUTLASS = """
import json, sys
sys.modules["cutlass"] = sys.modules["cuda"] = None
from dcp_decode.config import load_config
from dcp_decode.control.solo import SoloControlPlane
from dcp_decode.run import run_rank
summary = run_rank(load_config(None, json.loads(sys.argv[1])), SoloControlPlane())
print(summary.verified, summary.digest)
"""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("route", ["push", "local"])
def test_a_run_without_cutlass_has_the_digest_of_one_that_compiles(route: str, tmp_path: Path, device: torch.device):
    config = load_config(None, VALUES | {"parallel.route": route})
    geometry, push = config.geometry(), route == "push"
    batches = step_batches(config.service.draft_tokens + 1, geometry)
    try:
        builder.build(geometry, push, batches, [architecture_of(device)], tmp_path)
    except UnsupportedEnvironment as error:
        pytest.skip(f"no build on this machine: {error}")
    values = VALUES | {"parallel.route": route, "parallel.kernels": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_CUTLASS, json.dumps(values)], capture_output=True, text=True, timeout=60
    )
    compiled = run_rank(config, SoloControlPlane())
    assert done.stdout.split() == ["True", compiled.digest], done.stderr[-2000:]
    library = next(tmp_path.glob("*.so"))
    shutil.copy(__file__, library)
    with pytest.raises(ConfigError, match="is damaged"):
        open_kernels(tmp_path, geometry, push, batches, device)
