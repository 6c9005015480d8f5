"""The stages of one verify step of one layer, for one rank on the CPU, over its mailboxes.

    select_push -> select -> query_push -> sparse_decode -> [value_push ->] merge

Counters as on the GPU: a stage reads its own and increments the one of the stage before, so that no stage's number
can change while it runs. Ranks that share this process run stage by stage, all ranks' one before any rank's next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dcp_decode import numerics, topk
from dcp_decode.cpu.arrival import Arrival
from dcp_decode.cpu.attention import FAMILY, Partial, merge_sources, sparse_attention
from dcp_decode.digest import rows_digest
from dcp_decode.mailbox import Mailbox, Stage


@dataclass(frozen=True)
class LocalPartial:
    """Stage 2's output on the local route: latent BF16 [B, padded, 512] and lse_ln FP32 [B, padded] (natural log)."""

    latent: torch.Tensor
    lse_ln: torch.Tensor


class CpuStages:
    """One rank's stages. Sections of the mailbox are written through int32 views: a word is stored whole."""

    def __init__(
        self, mailbox: Mailbox, deadline_seconds: float, dead_peers: Callable[[], dict[int, str]] = dict
    ) -> None:
        self.mailbox = mailbox
        self.geometry = mailbox.geometry
        self.rank = mailbox.rank
        self.arrival = Arrival(mailbox, deadline_seconds, dead_peers)
        layout = mailbox.layout
        self._topk = [layout.topk.words(region) for region in mailbox.memory.regions]
        self._query = [layout.query.words(region) for region in mailbox.memory.regions]
        self._payload = [layout.payload.words(region) for region in mailbox.memory.regions]
        self._lse = [layout.lse_log2.words(region) for region in mailbox.memory.regions]

    def prepare(self, batch: int) -> None:
        """Called before the first use of a batch of B rows; there is nothing to compile on a CPU."""

    def family(self, batch: int) -> str:
        """Of the sparse decode of B rows (`oracle.FAMILIES`): the same for all."""
        return FAMILY

    def fuses(self, batch: int) -> bool:
        """Whether B rows may run as one launch: never on a CPU."""
        return False

    def select_push(self, candidates: torch.Tensor) -> None:
        """Stage 0, first half: this rank's local top-k (int64 [B, K]) into every rank's mailbox."""
        _, generation = self._use(Stage.TOPK)
        words = candidates.contiguous().view(torch.int32)
        for peer in self._topk:
            peer[generation, self.rank, : len(words)].copy_(words)

    def select(self, batch: int) -> torch.Tensor:
        """Stage 0, second half: this rank's share of the exact global top-k, positions int64 [B, K] as a prefix."""
        return topk.selected_by_rank(self.receive(batch), self.rank)

    def receive(self, batch: int) -> torch.Tensor:
        """The exchange of `select`: all ranks' lists, int64 [D, B, K]."""
        use, generation = self._use(Stage.TOPK)
        own = self._topk[self.rank][generation, :, :batch]
        words = self.arrival.snapshot(own, Stage.TOPK, use, lambda index: (index[0], index[1], -1, index[2]))
        own.fill_(numerics.ARMED_WORD)
        return words.view(torch.int64)

    def query_push(self, query: torch.Tensor) -> None:
        """Stage 1: own heads' query (BF16 [B, H, 576]) as E4M3 into every rank's query mailbox."""
        self._finish(Stage.TOPK)
        self._finish(Stage.MERGE)  # of the use before: the first use brings it from -1 to 0
        _, generation = self._use(Stage.QUERY)
        heads = slice(self.rank * self.geometry.owner_heads, (self.rank + 1) * self.geometry.owner_heads)
        words = numerics.quantize_e4m3(query, self.geometry.q_scale).view(torch.int32)
        for peer in self._query:
            peer[generation, : len(words), heads].copy_(words)

    def sparse_decode_push(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> None:
        """Stage 2, push route: partial rows and base-2 LSE straight into their owners' value mailboxes."""
        partial = self._attend(cache, rows, valid)
        self._push(Stage.SPARSE, numerics.bf16_rows(partial.rows), partial.lse_log2)

    def sparse_decode_local(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> LocalPartial:
        """Stage 2, local route: latent rows and natural-log LSE stay here; zeros and -inf for a row of count 0."""
        partial = self._attend(cache, rows, valid)
        shape = (len(valid), self.geometry.padded_heads)
        latent = torch.zeros(*shape, numerics.LATENT_DIM, dtype=torch.bfloat16)
        lse_ln = torch.full(shape, numerics.EMPTY_LSE)
        latent[:, : self.geometry.heads] = numerics.bf16_rows(partial.rows)
        lse_ln[:, : self.geometry.heads] = partial.lse_log2 * numerics.LN_2
        return LocalPartial(latent, lse_ln)

    def value_push(self, partial: LocalPartial) -> None:
        """Stage 3a, local route: push what stage 2 left, its LSE turned from natural to base 2."""
        self._finish(Stage.SPARSE)
        heads = self.geometry.heads
        # Stage 2 of another origin may leave any NaN, and a pair of 0xFFFF is an armed word.
        rows = numerics.canonical_bf16(partial.latent[:, :heads])
        self._push(Stage.PUSH, rows, partial.lse_ln[:, :heads] * numerics.LOG2_E)

    def merge(self, batch: int, after: Stage) -> torch.Tensor:
        """Stage 3 (3b): merged rows BF16 [B, H, 512] of this rank's own heads.

        after: the stage before, SPARSE on the push route and PUSH on the local route.
        """
        self._finish(after)
        use, generation = self._use(Stage.MERGE)
        lse_words = self._lse[self.rank][generation, :, :batch]
        lse = self.arrival.snapshot(lse_words, Stage.MERGE, use, _locate_lse).view(torch.float32)
        lse_words.fill_(numerics.ARMED_WORD)

        full = lse[:, :, 0] != numerics.EMPTY_LSE  # (D, B): a source is empty for all heads of a row or for none
        payload_words = self._payload[self.rank][generation, :, :batch]
        wanted = full[:, :, None, None]
        words = self.arrival.snapshot(payload_words, Stage.MERGE, use, _locate_payload, wanted)
        for source, batch_rows in enumerate(full):
            # Row by row: a masked fill would also write back words it does not change.
            payload_words[source].index_fill_(0, batch_rows.nonzero().squeeze(1), numerics.ARMED_WORD)
        words.masked_fill_(~wanted, 0)
        return merge_sources(words.view(torch.bfloat16), lse)

    def digest(self, merged: torch.Tensor, rows: torch.Tensor, digests: torch.Tensor) -> None:
        """SHA-256 of the first `rows` (int64 []) rows of each of BF16 [.., B, H, 512], into uint8 [.., 32]."""
        for message, digest in zip(merged.flatten(0, -4), digests.flatten(0, -2), strict=True):
            digest.copy_(torch.frombuffer(bytearray(rows_digest(message[:rows])), dtype=torch.uint8))

    def _attend(self, cache: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> Partial:
        self._finish(Stage.QUERY)
        use, generation = self._use(Stage.SPARSE)
        batch, heads = len(valid), self.geometry.heads
        own = self._query[self.rank][generation, :batch, :heads]
        words = self.arrival.snapshot(own, Stage.SPARSE, use, self._locate_query)
        # Rows of count 0 consume their words too: a late query must not stay behind for the generation's next use.
        own.fill_(numerics.ARMED_WORD)
        return sparse_attention(words.view(torch.uint8), cache, rows[:batch], valid, self.geometry)

    def _push(self, stage: Stage, rows: torch.Tensor, lse_log2: torch.Tensor) -> None:
        """rows: BF16 [B, heads, 512] with canonical NaNs; lse_log2: FP32 [B, heads]. Empty rows push only their LSE."""
        _, generation = self._use(stage)
        batch, h = len(rows), self.geometry.owner_heads
        row_words = rows.contiguous().view(torch.int32)
        lse_words = numerics.canonical_fp32(lse_log2).view(torch.int32)
        full = (lse_log2[:, 0] != numerics.EMPTY_LSE).nonzero().squeeze(1)
        for owner, (payload, lse) in enumerate(zip(self._payload, self._lse, strict=True)):
            heads = slice(owner * h, (owner + 1) * h)
            payload[generation, self.rank].index_copy_(0, full, row_words[full, heads])
            lse[generation, self.rank, :batch].copy_(lse_words[:, heads])

    def _locate_query(self, index: tuple[int, ...]) -> tuple[int, int, int, int]:
        row, head, word = index
        return self.geometry.owner_of_head(head), row, head, word

    def _use(self, stage: Stage) -> tuple[int, int]:
        use = int(self.mailbox.use_counter(stage))
        return use, use % self.geometry.generations

    def _finish(self, stage: Stage) -> None:
        """Count the use of the stage before this one as done."""
        self.mailbox.use_counter(stage).add_(1)


def _locate_payload(index: tuple[int, ...]) -> tuple[int, int, int, int]:
    source, row, head, word = index
    return source, row, head, word


def _locate_lse(index: tuple[int, ...]) -> tuple[int, int, int, int]:
    source, row, head = index
    return source, row, head, 0
