"""What the checkpoint asks of a peer: facts about it, and launches that attend with one rank's keys."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, Protocol

import torch

from dcp_decode.checkpoint.ranks import BenchRanks
from dcp_decode.checkpoint.timing import Subject


class PeerSkipped(Exception):
    """Why a peer can't be measured at a point; the message is what the report shows."""


@dataclass(frozen=True)
class PeerFacts:
    """What is the same at every point.

    kind: whether others maintain it. bytes_per_key: that it reads of a key. lse_base: of the LSE that it returns.
    combine: how partial results of split keys come together, and that the time holds it. source: package or module.
    """

    name: str
    kind: Literal["public", "own"]
    bytes_per_key: int
    lse_base: Literal["2", "e"]
    combine: str
    source: str


@dataclass(frozen=True)
class Candidate:
    """One way to run a peer at a point. launch: enqueue layer i on the current stream.

    outputs: rows [B, >= heads, 512] and LSE [B, >= heads] of the latest launch. heads_padded_to: head rows it computes.
    prepare: what must be enqueued before a graph's replay. layers: of a graph, None: as many as a chain has.
    """

    label: str
    launch: Callable[[int], None]
    outputs: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    heads_padded_to: int
    prepare: Callable[[], None]
    layers: int | None = None

    def subject(self, name: str) -> Subject:
        """As it is timed."""
        return Subject(name, self.launch, self.prepare, self.layers)


class Peer(Protocol):
    """One adapter."""

    facts: PeerFacts

    def candidates(self, ranks: BenchRanks) -> list[Candidate]:
        """Ways to run at the point of `ranks`, of which the fastest counts. Raises PeerSkipped."""
        ...


def require(module: str, package: str) -> ModuleType:
    """An optional package's module. Raises PeerSkipped when it is not installed or doesn't load."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise PeerSkipped(f"{package} is not installed") from None
    except (ImportError, OSError, RuntimeError) as error:
        raise PeerSkipped(f"{package} does not load: {' '.join(str(error).split())[:200]}") from None


def padded_query(query: torch.Tensor, heads: int, seed: int = 5) -> torch.Tensor:
    """BF16 [B, heads, 576]: the query, its further heads random (never zeros, which may run faster)."""
    generator = torch.Generator(device=query.device).manual_seed(seed)
    shape = (query.shape[0], heads, query.shape[2])
    padded = torch.randn(shape, generator=generator, device=query.device).to(query.dtype)
    padded[:, : query.shape[1]] = query
    return padded


class LatestOutputs:
    """Keeps what the latest launch returned, for kernels that allocate their outputs."""

    def __init__(self) -> None:
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self, rows: torch.Tensor, lse: torch.Tensor) -> None:
        self._outputs = rows, lse

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._outputs is not None, "nothing was launched"
        return self._outputs
