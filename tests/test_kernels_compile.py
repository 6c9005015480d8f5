"""Every kernel variant compiles for three architectures on a machine with no GPU, and needs what the table says.

After an intended change: `python tests/kernel_resources.py --update`.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cutlass")
import kernel_resources

if kernel_resources.tool() is None:
    pytest.skip("needs nvidia-cuda-cuobjdump", allow_module_level=True)


@pytest.mark.parametrize("architecture", kernel_resources.ARCHITECTURES)
def test_resources_and_instructions(architecture):
    found = kernel_resources.of_architecture(architecture)
    assert found == json.loads(kernel_resources.TABLE.read_text())[architecture]
    for name, kernel in found.items():
        present = set(kernel["instructions"])
        assert kernel["stack_bytes"] == kernel["local_bytes"] == 0, name
        assert not present & {"ld.local", "st.local"}, name
        assert {"griddepcontrol.wait", "griddepcontrol.launch_dependents"} <= present, name
        assert kernel["resident_ctas"] >= 1, name
        if name.startswith("sparse"):
            wanted = {"cp.async.bulk.shared::cluster.global", "st.async", "fence.acq_rel.sys"}
            wanted |= {"ld.relaxed.sys.global.v4", "cvt.rn.satfinite.e4m3x2.f32"}
            assert wanted <= present, name
            assert ("cp.async.bulk.shared::cluster.shared::cta" in present) == ("bulk" in name), name
        elif name == "query_push":
            assert {"fence.acq_rel.sys", "st.relaxed.sys.global.v4", "cvt.rn.satfinite.e4m3x2.f32"} <= present
        elif name.startswith("merge"):
            assert {"ld.relaxed.sys.global.v4", "st.relaxed.sys.global.v4"} <= present
            assert "fence.acq_rel.sys" not in present
