"""Keeps multicast out of a library: sets the variable that turns it off, and refuses an environment that turns it on.

Multicast objects of a fabric manager have failed in public reports in many ways (no device, a stalled bind, a
rendezvous that only some ranks believe in), and no kernel here uses them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from dcp_decode.errors import UnsupportedEnvironment


@dataclass(frozen=True)
class NoMulticast:
    """A library's variable, and its value that turns multicast off."""

    variable: str
    value: str


NVSHMEM = NoMulticast("NVSHMEM_DISABLE_NVLS", "1")
SYMMETRIC_MEMORY = NoMulticast("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
NCCL = NoMulticast("NCCL_NVLS_ENABLE", "0")


def forbid_multicast(environment: MutableMapping[str, str], library: NoMulticast) -> None:
    """Set the variable before the library that reads it starts. Raises UnsupportedEnvironment if it says otherwise."""
    given = environment.setdefault(library.variable, library.value)
    if given != library.value:
        raise UnsupportedEnvironment(
            f"{library.variable}={given}: multicast is never used, unset it or set it to {library.value}"
        )
