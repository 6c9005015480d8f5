"""Every kernel variant compiles for three architectures on a machine with no GPU, and needs what the table says.

After an intended change: `python tests/kernel_resources.py --update`.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cutlass")
import kernel_resources

from dcp_decode.geometry import Geometry
from dcp_decode.kernels import disk_cache
from dcp_decode.kernels.sparse import compile_sparse
from dcp_decode.kernels.sparse_config import SparseConfig
from dcp_decode.kernels.sparse_refusal import RefusalReason, SparseRefused
from dcp_decode.kernels.warpgroup_config import WarpgroupConfig

if kernel_resources.tools() is None:
    pytest.skip("needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm", allow_module_level=True)

# Of every variant whose name begins so; "bulk peer copy" is for the bulk exchange alone.
NEEDED = {
    "topk_push": {"system store", "system fence"},
    "topk_receive": {"system load", "system store", "system fence"},
    "query_push": {"pack E4M3", "system store", "system fence"},
    "value_push": {"system store"},
    "merge": {"system load", "system store"},
    "digest": {"rotation"},
    "sparse": {
        "system load", "system store", "system fence", "bulk load", "barrier wait", "cluster barrier", "peer store",
        "matrix load", "unpack E4M3", "pack E4M3", "tensor core",
    },
}  # fmt: skip
NEEDED["chain"] = NEEDED["sparse"]
NEEDED["warpgroup"] = NEEDED["sparse"] - {"cluster barrier", "peer store", "tensor core"} | {
    "warpgroup product", "matrix store",
}  # fmt: skip


@pytest.mark.parametrize("architecture", kernel_resources.ARCHITECTURES)
def test_resources_and_instructions(architecture):
    found = kernel_resources.of_architecture(architecture)
    control = found.pop(kernel_resources.CONTROL)
    assert control["stack_bytes"] > 0, "spills would not be seen"
    assert control["local_accesses"] > 0
    assert found == json.loads(kernel_resources.TABLE.read_text())[architecture]
    for name, kernel in found.items():
        assert kernel["stack_bytes"] == kernel["local_bytes"] == kernel["local_accesses"] == 0, name
        assert kernel["resident_ctas"] >= 1, name
        present = set(kernel["instructions"])
        kind = next(kind for kind in NEEDED if name.startswith(kind))
        assert NEEDED[kind] | {"dependency wait", "dependent launch"} <= present, name
        assert ("bulk peer copy" in present) == ("bulk" in name), name
        if kind == "warpgroup":  # one CTA a row has no peers
            assert ("peer store" in present) == ("x1x" not in name), name
            assert ("cluster barrier" in present) == ("x1x" not in name or "groups" in name), name
        if kind == "merge":  # a fence would cost what the protocol model shows to be needless
            assert "system fence" not in present


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_103a"])
def test_warpgroups_are_refused_where_wgmma_is_missing(architecture, monkeypatch):
    monkeypatch.setattr(disk_cache, "architecture", lambda: architecture)
    with pytest.raises(SparseRefused, match=f"{architecture}, must be sm_90a") as refused:
        compile_sparse(WarpgroupConfig(Geometry(), 5, head_rows=16))
    assert refused.value.refusal.reason is RefusalReason.ARCHITECTURE


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SparseConfig(Geometry(capacity=5), 5, tiles=0), RefusalReason.TILES),
        (WarpgroupConfig(Geometry(capacity=5), 5, head_rows=12), RefusalReason.HEAD_ROWS),
    ],
)
def test_refused_choices_are_not_compiled(config, reason, monkeypatch):
    monkeypatch.setattr(disk_cache, "architecture", lambda: "sm_90a")
    with pytest.raises(SparseRefused, match=reason.value) as refused:
        compile_sparse(config)
    assert refused.value.refusal.reason is reason
