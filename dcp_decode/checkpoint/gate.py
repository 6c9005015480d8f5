"""The correctness gate around a timing: the very kernels, buffers and inputs that are timed, against the oracle.

It is passed before and after, in the same process, and both times with the same bits. Checked are the first and the
last copy of the mailboxes: the sparse decode's partial rows and LSE of all heads by `verify_partial`; a chain in both
generations, its merged rows by `verify_merged` over its own partial and the words that stand for the other sources,
after which all mailboxes must be armed again. Outputs are poisoned first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from dcp_decode import numerics, oracle
from dcp_decode.checkpoint.ranks import BenchRanks
from dcp_decode.checkpoint.timing import Subject
from dcp_decode.digest import row_bytes
from dcp_decode.errors import WrongResult
from dcp_decode.kernels.sparse_layout import DecodeConfig
from dcp_decode.mailbox import Section
from dcp_decode.verdict import Verdict, Worst


@dataclass(frozen=True)
class Passed:
    """What a passed gate leaves.

    worst: the (row, head) closest to its bound. largest_bound: of any (row, head) against the oracle.
    digest: SHA-256 over all checked rows.
    """

    worst: Worst
    largest_bound: float
    digest: str

    @property
    def share(self) -> float:
        """Worst error over its bound."""
        return self.worst.error / self.worst.bound


class Gate:
    """The oracle's side of the measuring ranks of one problem."""

    def __init__(self, ranks: BenchRanks) -> None:
        self.ranks = ranks
        self.problem = ranks.problem
        self.layers = tuple(dict.fromkeys((0, ranks.copies - 1)))
        # By instance, so that a point's references go with it.
        self.partial = cache(self._partial)
        self._merged = cache(self._merge)

    def check_sparse(self, subject: Subject, config: DecodeConfig, label: str) -> Passed:
        """A sparse decode alone, on its route. Raises WrongResult, naming label, layer, row and head, or WaitFailed."""
        verdicts, outputs = [], []
        for layer in self.layers:
            subject.prepare()
            self._launch(subject, layer, label)
            for index, mailbox in enumerate(self.ranks.mailboxes_of(layer)):
                expected = self.partial(layer, index, config.family)
                if config.push:
                    out, lse = self._pushed(mailbox.memory.regions, mailbox.rank)
                    verdict = oracle.verify_partial(out, lse, expected)
                else:
                    heads = self.ranks.geometry.heads
                    out, lse = (rows[index, :, :heads].clone() for rows in (self.ranks.latent, self.ranks.lse_ln))
                    verdict = oracle.verify_partial(out, lse, expected, "ln")
                verdict.require(f"{label}, layer {layer}, rank {mailbox.rank}")
                verdicts.append(verdict)
                outputs += [out, lse]
        return passed_by(verdicts, outputs)

    def check_chain(self, subject: Subject, config: DecodeConfig, label: str) -> Passed:
        """A whole chain, of one launch or several. Raises WrongResult, also for words left unarmed, or WaitFailed."""
        verdicts, outputs = [], []
        for first in self.layers:
            subject.prepare()
            for layer in range(first, self.problem.layers, self.ranks.copies):
                self._launch(subject, layer, label)
                for index, rank in enumerate(self.ranks.ranks):
                    merged = self.ranks.merged[index]
                    verdict = oracle.verify_merged(merged, self._merged(layer, index, config.family))
                    verdict.require(f"{label}, layer {layer}, rank {rank}")
                    verdicts.append(verdict)
                    outputs.append(merged.clone())
            for mailbox in self.ranks.mailboxes_of(first):
                self._require_armed(mailbox.memory.local, f"{label}, layer {first}, rank {mailbox.rank}")
        return passed_by(verdicts, outputs)

    def _launch(self, subject: Subject, layer: int, label: str) -> None:
        self.ranks.poison()
        subject.launch(layer)
        self.ranks.synchronize()
        self.ranks.require_no_expired_wait(f"{label}, layer {layer}")  # the rows that it leaves are no wrong result

    def _pushed(self, regions: tuple[torch.Tensor, ...], source: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A source's partial rows BF16 [B, heads, 512] and base-2 LSE [B, heads], gathered from their owners."""
        layout, batch = self.ranks.layout, self.ranks.batch

        def gathered(section: Section) -> torch.Tensor:
            return torch.cat([section.view(region)[0, source, :batch] for region in regions], 1)

        return gathered(layout.payload), gathered(layout.lse_log2)

    def _partial(self, layer: int, index: int, family: str) -> oracle.Partial:
        """Expected partial of measuring rank number `index`: all heads."""
        problem = self.problem
        return oracle.walk_partial(
            problem.query_bytes,
            problem.caches.e4m3,
            problem.rows_of(layer, index),
            problem.valid,
            problem.geometry,
            oracle.family_named(family),
        )

    def _merge(self, layer: int, index: int, family: str) -> oracle.Merged:
        """Expected merged rows of measuring rank number `index`: its own heads over all sources."""
        ranks = self.ranks
        heads = ranks.own_heads(ranks.ranks[index])
        parts = []
        for source in range(ranks.geometry.dcp):
            if source in ranks.ranks:
                parts.append(_of_heads(self.partial(layer, ranks.ranks.index(source), family), heads))
            else:
                parts.append(_exact(ranks.payload[index, source], ranks.lse_log2[index, source]))
        return oracle.merge_partials(parts)

    def _require_armed(self, region: torch.Tensor, label: str) -> None:
        start = self.ranks.layout.query.offset
        left = int((region[start:].view(torch.int32) != numerics.ARMED_WORD).sum())
        if left:
            raise WrongResult(f"{label}: {left} mailbox words are not armed after the merge")


def _of_heads(partial: oracle.Partial, heads: slice) -> oracle.Partial:
    fields = {name: getattr(partial, name) for name in oracle.Partial.__dataclass_fields__}
    return oracle.Partial(**{name: of if name == "empty" else of[:, heads] for name, of in fields.items()})


def _exact(payload: torch.Tensor, lse_log2: torch.Tensor) -> oracle.Partial:
    """A partial that is known exactly: BF16 rows [B, H, 512] and FP32 LSE [B, H] that lie in a mailbox."""
    rows, lse = payload.double(), lse_log2.double()
    none = torch.zeros_like(lse, dtype=torch.bool)
    return oracle.Partial(rows, lse, rows, lse, torch.zeros_like(rows), torch.zeros_like(lse), none, none.any(1))


def passed_by(verdicts: list[Verdict], outputs: list[torch.Tensor]) -> Passed:
    """What verdicts that all passed leave, with the digest of the rows that they are about."""
    worst = max((verdict.worst for verdict in verdicts), key=lambda one: one.error / one.bound if one.bound else 0.0)
    digest = hashlib.sha256()
    for rows in outputs:
        digest.update(row_bytes(rows.cpu()))
    largest = max(float(verdict.bound_oracle.max()) for verdict in verdicts)
    return Passed(worst, largest, digest.hexdigest())


def passed_by_all(ranks: Sequence[Passed]) -> Passed:
    """What a group leaves: the worst of its ranks, and a digest over the rows of all."""
    worst = max(ranks, key=lambda one: one.share)
    digest = hashlib.sha256("".join(one.digest for one in ranks).encode())
    return Passed(worst.worst, max(one.largest_bound for one in ranks), digest.hexdigest())
