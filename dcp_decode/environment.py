"""Where a run happens: package versions, the commit, the device. Reads only; imports no GPU package."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "numpy",
    "nvidia-cutlass-dsl",
    "nvshmem4py-cu13",
    "nvidia-nvshmem-cu13",
    "cuda-python",
    "mpi4py",
    "openmpi",
    "triton",
    "sgl-flash-mla",
    "flashinfer-python",
)
ARCHIVAL = ".git_archival.txt"  # `git archive` writes the commit into it (.gitattributes)
SMI_FIELDS = "name,driver_version,compute_cap,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"


def versions() -> dict[str, str]:
    """Python and every installed package that a run may use, by name."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout this package runs from, and whether tracked files differ.

    Of an archive (`git archive`) only the commit is known; elsewhere neither is.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return _archived_commit(root / ARCHIVAL), None
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if head is None:
        return None, None
    return head, bool(_output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"))


def _archived_commit(file: Path) -> str | None:
    """What `git archive` has put in the place of a format; None if it never did."""
    text = file.read_text().strip() if file.exists() else ""
    return text if text and "$" not in text else None


def describe_device(device: str) -> dict[str, Any]:
    """name, driver, architecture and clocks (MHz) of `cpu`, or of this process's current CUDA device."""
    if device == "cpu":
        return {"name": _processor(), "driver": None, "architecture": platform.machine(), "clocks": None}
    import torch  # only here: `conclude` describes runs without it

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    described: dict[str, Any] = {
        "name": properties.name,
        "driver": None,
        "architecture": f"sm_{properties.major}{properties.minor}",
        "clocks": None,
    }
    query = _output(
        "nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"
    )
    if query is not None:
        values = [value.strip() for value in query.split(",")]
        described["driver"] = values[1]
        described["clocks"] = dict(zip(("sm", "memory", "max_sm", "max_memory"), values[3:], strict=True))
    return described


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
