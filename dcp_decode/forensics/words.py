"""From the bytes of a rank's region of symmetric memory, in host memory, to evidence."""

from __future__ import annotations

import torch

from dcp_decode import numerics
from dcp_decode.fabric.memory import SymmetricMemory
from dcp_decode.forensics.evidence import ControlWords, ExpiredWait, MailboxEvidence, Slot, TornRow
from dcp_decode.mailbox import Mailbox, MailboxLayout, Stage
from dcp_decode.waits import read_record

LISTED_TORN_ROWS = 8  # of a slot


def read_mailbox(layout: MailboxLayout, region: torch.Tensor, rank: int) -> MailboxEvidence:
    """The evidence of a rank's own region (uint8 [nbytes], on the host)."""
    slots = [slot for mailbox in ("topk", "query", "payload", "lse_log2") for slot in _slots(layout, region, mailbox)]
    return MailboxEvidence(rank=rank, control=read_control(layout, region), slots=tuple(slots))


def read_control(layout: MailboxLayout, region: torch.Tensor) -> ControlWords:
    """The control words of any rank's region, on the host; one that was never armed may hold anything."""
    alone = Mailbox(layout, SymmetricMemory(0, (region,), torch.empty(0, dtype=torch.int64)))
    try:
        report = read_record(alone)
    except ValueError:  # no stage has that number
        report = None
    return ControlWords(
        uses={stage.name: int(alone.use_counter(stage)) for stage in Stage},
        aborted=bool(alone.abort_word),
        report=None if report is None else ExpiredWait.model_validate(report.as_dict()),
    )


def _slots(layout: MailboxLayout, region: torch.Tensor, mailbox: str) -> list[Slot]:
    rows, words_a_head = _rows(layout, region, mailbox)
    armed = rows == numerics.ARMED_WORD
    missing = armed.sum(-1)  # (G, D, cap)
    width = rows.shape[-1]
    return [
        Slot(
            mailbox=mailbox,
            generation=generation,
            source=source,
            armed=int((slot == width).sum()),
            arrived=int((slot == 0).sum()),
            torn=tuple(
                _torn(armed[generation, source, row], row, words_a_head)
                for row in ((slot > 0) & (slot < width)).nonzero().flatten().tolist()[:LISTED_TORN_ROWS]
            ),
        )
        for generation, sources in enumerate(missing)
        for source, slot in enumerate(sources)
    ]


def _rows(layout: MailboxLayout, region: torch.Tensor, mailbox: str) -> tuple[torch.Tensor, int]:
    """int32 words [G, D, cap, words of a row] by source, and how many of them a head has (0: no heads)."""
    geometry = layout.geometry
    if mailbox == "topk":
        return layout.topk.words(region), 0
    if mailbox == "query":
        words = layout.query.words(region)[:, :, : geometry.heads]  # (G, cap, heads, 144)
        by_source = words.unflatten(2, (geometry.dcp, geometry.owner_heads)).movedim(2, 1)
        return by_source.flatten(3), words.shape[-1]
    if mailbox == "payload":
        words = layout.payload.words(region)  # (G, D, cap, H, 256)
        return words.flatten(3), words.shape[-1]
    return layout.lse_log2.words(region), 1


def _torn(armed: torch.Tensor, row: int, words_a_head: int) -> TornRow:
    first = int(armed.nonzero()[0])
    head, word = divmod(first, words_a_head) if words_a_head else (-1, first)
    words = armed.numel()
    return TornRow(row=row, arrived=words - int(armed.sum()), words=words, head=head, word=word)
