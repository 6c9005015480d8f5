"""How much memory this process may use: the machine's, or its control groups' smallest limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_decode.config import load_config
from dcp_decode.host_memory import memory_bytes, needed_bytes
from dcp_decode.mailbox import MailboxLayout

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V1 = "5:cpu,cpuacct:/pod\n4:memory:/pod/own\n0::/\n"
UNLIMITED = "9223372036854771712"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "4096"}, 4096),  # a container with a namespace of its own
        ("0::/pod/own\n", {"pod/memory.max": "4096", "pod/own/memory.max": "8192"}, 4096),
        ("0::/pod/own\n", {"pod/memory.max": "max", "pod/own/memory.max": "8192"}, 8192),
        ("0::/docker/own\n", {"memory.max": "4096"}, 4096),  # without one, only its own group is mounted
        (V1, {"memory/memory.limit_in_bytes": UNLIMITED, "memory/pod/memory.limit_in_bytes": "4096"}, 4096),
        (V1, {"memory/memory.limit_in_bytes": UNLIMITED, "memory/pod/own/memory.limit_in_bytes": "8192"}, 8192),
        (V1, {"memory/memory.limit_in_bytes": UNLIMITED, "memory/other/memory.limit_in_bytes": "4096"}, MACHINE),
        ("0::/\n", {"memory.max": "max"}, MACHINE),
        ("0::/\n", {}, MACHINE),
        (None, {"memory.max": "4096"}, MACHINE),
    ],
)
def test_the_smallest_limit_counts(groups: str | None, limits: dict[str, str], expected: int, tmp_path: Path) -> None:
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, limit in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit + "\n")
    assert memory_bytes(tmp_path) == expected
    assert 0 < memory_bytes() <= MACHINE


def test_a_rank_needs_its_cache_and_its_mailboxes() -> None:
    config = load_config(None, {"model.layers": 3, "cache.pages": 5, "cache.page_stride_rows": 70})
    assert needed_bytes(config) == 3 * 5 * 70 * 576 + MailboxLayout(config.geometry()).nbytes
