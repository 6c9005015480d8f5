"""Stand-ins for the GPU kernels that `checkpoint.ranks` compiles and launches: torch on the CPU, through the mailboxes.

They follow the protocol where the checkpoint depends on it: generations by the use counters, the next stage's
increment, re-arming, and a failure where a word that they need has not arrived.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_decode import numerics, oracle
from dcp_decode.checkpoint import ranks
from dcp_decode.checkpoint.inputs import KeyCaches, L2Eviction, Problem
from dcp_decode.checkpoint.points import L2State, Shape
from dcp_decode.geometry import Geometry
from dcp_decode.kernels.chain_config import WAVE_MULTIPROCESSORS
from dcp_decode.mailbox import Mailbox, Section, Stage

GEOMETRY = Geometry(heads=16, dcp=2, padded_heads=16, capacity=2, topk=32)
SHAPE = Shape(batch=2, heads=16, keys=8)
PART_ROWS = 256


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in the place of the kernels."""
    for name in ("query", "sparse", "value", "value_push", "chain"):
        monkeypatch.setattr(ranks, f"compile_{name}", lambda config: config)
        monkeypatch.setattr(ranks, f"run_{name}", globals()[f"run_{name}"])
    monkeypatch.setattr(ranks, "current_stream", lambda: 0)
    monkeypatch.setattr(ranks, "multiprocessors", lambda device: WAVE_MULTIPROCESSORS)


def bench_ranks(l2: L2State = "cold", running: tuple[int, ...] = (1,), layers: int = 4) -> ranks.BenchRanks:
    """Measuring ranks of a small problem on the CPU."""
    caches = KeyCaches(2, GEOMETRY.k_scale, seed=5, part_rows=PART_ROWS, device="cpu")
    problem = Problem(GEOMETRY, SHAPE, l2, len(running), layers, caches, seed=6)
    return ranks.BenchRanks(problem, running, L2Eviction("cpu", 64))


def run_query(config: Any, mailbox: Mailbox, query: torch.Tensor, stream: int) -> None:
    use = _use(mailbox, Stage.QUERY)
    for region in mailbox.memory.regions:
        words = mailbox.layout.query.view(region)[use, : len(query), _own_heads(mailbox)]
        words.copy_(numerics.quantize_e4m3(query, mailbox.geometry.q_scale))
    mailbox.use_counter(Stage.MERGE).add_(1)


def run_sparse(
    config: Any, mailbox: Mailbox, kv: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor,
    latent: torch.Tensor | None, lse: torch.Tensor | None, deadline: int, stream: int,
) -> None:  # fmt: skip
    use = _use(mailbox, Stage.SPARSE)
    words = _arrived(mailbox, mailbox.layout.query, (use, slice(len(valid))))
    query = words.contiguous().view(torch.uint8).view(len(valid), -1, numerics.ROW_BYTES)
    partial = oracle.walk_partial(query, kv, rows, valid, mailbox.geometry, oracle.family_named(config.family))
    words.fill_(numerics.ARMED_WORD)
    mailbox.use_counter(Stage.QUERY).add_(1)
    out, lse_log2 = partial.twin.to(torch.bfloat16), partial.twin_lse.float()
    if latent is None or lse is None:
        _push(mailbox, use, out, lse_log2)
    else:
        latent.copy_(out)
        lse.copy_(lse_log2 * numerics.LN_2)


def run_value_push(config: Any, mailbox: Mailbox, latent: torch.Tensor, lse_ln: torch.Tensor, stream: int) -> None:
    _push(mailbox, _use(mailbox, Stage.PUSH), latent, lse_ln * numerics.LOG2_E)
    mailbox.use_counter(Stage.SPARSE).add_(1)


def run_value(config: Any, mailbox: Mailbox, merged: torch.Tensor, deadline: int, stream: int) -> None:
    use = _use(mailbox, Stage.MERGE)
    place = (use, slice(None), slice(len(merged)))
    lse_words = _arrived(mailbox, mailbox.layout.lse_log2, place)
    payload_words = _arrived(mailbox, mailbox.layout.payload, place)
    lse = lse_words.contiguous().view(torch.float32)
    weight = torch.exp2(lse - lse.amax(0))[..., None]
    rows = payload_words.contiguous().view(torch.bfloat16).float()
    merged.copy_((weight * rows).sum(0) / weight.sum(0))
    lse_words.fill_(numerics.ARMED_WORD)
    payload_words.fill_(numerics.ARMED_WORD)
    mailbox.use_counter(Stage.SPARSE if config.push else Stage.PUSH).add_(1)


def run_chain(
    config: Any, mailbox: Mailbox, query: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor,
    merged: torch.Tensor, deadline: int, stream: int,
) -> None:  # fmt: skip
    use = _use(mailbox, Stage.QUERY)
    credit = mailbox.layout.credit.words(mailbox.memory.local)[use]
    others = [rank for rank in range(mailbox.geometry.dcp) if rank != mailbox.rank]
    assert bool((credit[others] != numerics.ARMED_WORD).all()), "a credit word has not arrived"
    credit.fill_(numerics.ARMED_WORD)
    run_query(config, mailbox, query, stream)
    run_sparse(config.sparse, mailbox, kv, rows, valid, None, None, deadline, stream)
    run_value(config.sparse, mailbox, merged, deadline, stream)


def _use(mailbox: Mailbox, stage: Stage) -> int:
    return int(mailbox.use_counter(stage)) % mailbox.geometry.generations


def _own_heads(mailbox: Mailbox) -> slice:
    first = mailbox.rank * mailbox.geometry.owner_heads
    return slice(first, first + mailbox.geometry.owner_heads)


def _arrived(mailbox: Mailbox, section: Section, place: tuple[int | slice, ...]) -> torch.Tensor:
    """A view of the words at a place, all of which must be there."""
    words = section.words(mailbox.memory.local)[place]
    assert bool((words != numerics.ARMED_WORD).all()), "a word has not arrived"
    return words


def _push(mailbox: Mailbox, use: int, out: torch.Tensor, lse_log2: torch.Tensor) -> None:
    heads = mailbox.geometry.owner_heads
    for owner, region in enumerate(mailbox.memory.regions):
        own = slice(owner * heads, (owner + 1) * heads)
        mailbox.layout.payload.view(region)[use, mailbox.rank, : len(out)] = out[:, own]
        mailbox.layout.lse_log2.view(region)[use, mailbox.rank, : len(out)] = lse_log2[:, own]
