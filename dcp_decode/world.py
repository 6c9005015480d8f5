"""Who started this process, and whether that fits the config: refused before the ranks start, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_decode.config import RunConfig
from dcp_decode.errors import UnsupportedEnvironment


@dataclass(frozen=True)
class Launcher:
    """Who started this process: name (builtin, torchrun, mpi), its rank and the size of its world."""

    name: str
    rank: int
    size: int


def check_world(launcher: Launcher, config: RunConfig) -> None:
    """Refuse a launcher whose world doesn't fit the config. Raises UnsupportedEnvironment."""
    if launcher.name == "builtin":
        return
    if config.parallel.fabric == "loopback":
        raise UnsupportedEnvironment(
            f"parallel.fabric = loopback runs all ranks in one process: start it without {launcher.name}"
        )
    if launcher.size != config.parallel.dcp:
        raise UnsupportedEnvironment(
            f"{launcher.name} started {launcher.size} ranks, but parallel.dcp is {config.parallel.dcp}"
        )
