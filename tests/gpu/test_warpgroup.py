"""SparseWarpgroups on a GPU: what is asked of SparseDcpDecode (`test_sparse`), over heads, CTAs and chunks."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs wgmma: a GPU of compute capability 9.0", allow_module_level=True)

from sparse_cases import SparseCases  # noqa: E402

from dcp_decode.kernels.sparse_layout import HEAD_ROWS, WAVE_OF_CLUSTERS  # noqa: E402
from dcp_decode.kernels.warpgroup_config import MAX_CLUSTER, WarpgroupConfig  # noqa: E402

pytestmark = pytest.mark.gpu

# (heads of a CTA, CTAs that share a row's keys, keys of a chunk, head groups that load them together)
SIZES = [
    (32, 1, 256, 1), (32, 1, 128, 1), (32, 1, 64, 1), (32, 2, 256, 1), (32, 2, 128, 1), (32, 4, 64, 1), (32, 8, 256, 1),
    (24, 1, 256, 1), (24, 2, 256, 1), (24, 4, 128, 1), (16, 1, 256, 1), (16, 2, 128, 1), (16, 4, 64, 1),
    (16, 4, 256, 1), (16, 8, 64, 1), (8, 1, 256, 1), (8, 2, 128, 1), (8, 4, 64, 1), (8, 8, 64, 1), (8, 8, 256, 1),
    (32, 1, 256, 3), (32, 2, 256, 3), (24, 1, 256, 2), (16, 1, 256, 3), (16, 1, 256, 6), (16, 2, 128, 3),
    (16, 4, 64, 2), (16, 4, 256, 2), (8, 1, 256, 4), (8, 2, 128, 2), (8, 4, 64, 2),
    (32, 4, 256, 1), (24, 4, 128, 2), (16, 1, 256, 2), (16, 2, 128, 2), (16, 2, 256, 2), (16, 4, 128, 2),
    (8, 2, 256, 2),
]  # fmt: skip


def of_size(head_rows: int, split: int, chunk: int, groups: int = 1, **choices: object) -> partial:
    return partial(WarpgroupConfig, head_rows=head_rows, split=split, chunk=chunk, groups=groups, **choices)


VARIANTS = [of_size(*size) for size in SIZES] + [
    of_size(*size, **choices)
    for size in ((32, 1, 256), (16, 4, 64))
    for choices in ({"trigger": "start"}, {"trigger": "end"}, {"pdl": False})
]


def of_family(split: int, chunk: int) -> list[partial]:
    """Heads of a CTA, head groups of a cluster and how kernels follow each other change no bit."""
    variants = [of_size(head_rows, split, chunk) for head_rows in HEAD_ROWS]
    variants += [of_size(16, split, chunk, groups) for groups in (2, 3, 6) if split * groups <= MAX_CLUSTER]
    others = ({"trigger": "start"}, {"trigger": "end"}, {"pdl": False})
    return variants + [of_size(16, split, chunk, **choices) for choices in others]


class TestWarpgroups(SparseCases):
    variants = VARIANTS
    # No cluster; an inbox over the keys; inboxes beside them; one, two and four warpgroups a tile of keys; keys loaded
    # once for several CTAs, without and with peers that have other keys.
    shapes = (
        of_size(32, 1, 256),
        of_size(32, 8, 256),
        of_size(16, 4, 64),
        of_size(16, 2, 128),
        of_size(8, 4, 64),
        of_size(16, 1, 256, 3),
        of_size(16, 4, 256, 2),
    )
    small = (of_size(32, 1, 256), of_size(16, 4, 64), of_size(16, 1, 256, 2))
    families = (of_family(1, 256), of_family(2, 128), of_family(4, 64), of_family(8, 256))


@pytest.mark.skipif(
    torch.cuda.get_device_properties(0).multi_processor_count != WAVE_OF_CLUSTERS[1],
    reason="the layout's waves are those of 132 multiprocessors",
)
def test_waves_of_clusters_are_those_of_the_driver() -> None:
    command = [sys.executable, str(Path(__file__).parent / "cluster_waves.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {ctas for _, ctas, _ in found} == set(WAVE_OF_CLUSTERS)
    assert [(name, ctas, WAVE_OF_CLUSTERS[ctas]) for name, ctas, _ in found] == [tuple(entry) for entry in found]
