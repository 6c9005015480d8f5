"""Exact top-k over ranks: order-preserving keys, the merge of the ranks' lists, and compaction to cache rows.

A candidate is one int64 key, so that integer comparison is the total order "score descending, then lower position":

    bit 63 .. 32                                       bit 31 .. 0
    FP32 score as an order-preserving signed integer | 0x7FFFFFFF - position

A key among the K best of all has at most K - 1 keys above it, so it is among the K best of its own rank: merging the
ranks' local lists of K is exact. Keys are distinct (positions are), hence so is the merged set, on every rank.
Positions never become floating point. -0.0 counts as +0.0, and a NaN score sorts below every number but above the
absent key: with fewer than K visible positions it is still selected, as every visible position then is. No key holds
an armed word (0xFFFFFFFF): the low word's top bit is clear, and the high word would need the score bits of -0.0.
"""

from __future__ import annotations

import torch

from dcp_decode.geometry import Geometry

LAST_POSITION = 0x7FFFFFFF
ABSENT = torch.iinfo(torch.int64).min  # below every candidate; its words are 0x80000000 and 0, so it can be pushed
_NAN_SCORE = -0x7FFFFFFF  # below -inf (0x807FFFFF), above the absent key's high word


def candidate_keys(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 keys (same shape) of FP32 scores and int64 global positions (0 .. 2**31 - 1)."""
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits >= 0, bits, bits ^ LAST_POSITION)
    ordered = ordered.masked_fill(torch.isnan(scores), _NAN_SCORE)
    return (ordered << 32) | (LAST_POSITION - positions)


def key_positions(keys: torch.Tensor) -> torch.Tensor:
    """Global positions (int64) of candidate keys; meaningless for ABSENT."""
    return LAST_POSITION - (keys & 0xFFFFFFFF)


def local_candidates(scores: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """A rank's best candidates of one row: int64 [width], filled up with ABSENT. scores, positions: [n]."""
    keys = candidate_keys(scores, positions)
    if keys.numel() > width:
        keys = torch.topk(keys, width, sorted=False).values
    out = torch.full((width,), ABSENT, dtype=torch.int64, device=keys.device)
    out[: keys.numel()] = keys
    return out


def batch_candidates(
    scores: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`local_candidates` of many rows at once, in a static shape and in ascending position order.

    scores: FP32 [..., S]; positions: int64, ascending along S, and visible: bool, the positions that a row may select,
    both broadcast to it. Returns int64 keys [..., width], and where in S each lies, int64 [..., width] (0 if absent).
    """
    keys = candidate_keys(scores, positions).masked_fill_(~visible, ABSENT)
    missing = width - keys.shape[-1]
    if missing >= 0:
        places = torch.arange(keys.shape[-1], device=keys.device).expand(keys.shape)
        return _padded(keys, missing, ABSENT), _padded(places, missing, 0)
    places = torch.topk(keys, width, dim=-1, sorted=False).indices.sort(dim=-1).values
    return keys.gather(-1, places), places


def _padded(rows: torch.Tensor, count: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, count), value=value)


def selection_border(candidates: torch.Tensor, width: int) -> torch.Tensor:
    """The lowest key of the best `width` of `candidates` (int64 [..., N]) that is present: int64 [..., 1]."""
    border = candidates.kthvalue(candidates.shape[-1] - width + 1, dim=-1, keepdim=True).values
    return border.clamp_(min=ABSENT + 1)


def selected_by_rank(candidates: torch.Tensor, rank: int) -> torch.Tensor:
    """Positions of the exact global top-k that `rank` stores, ascending, as a prefix.

    candidates: int64 [D, B, K], every rank's local lists. Returns int64 [B, K], absent places -1.
    """
    ranks, batch, width = candidates.shape
    merged = candidates.permute(1, 0, 2).reshape(batch, ranks * width)
    last_selected = torch.topk(merged, width, sorted=True).values[:, -1:]
    own = candidates[rank]
    selected = (own >= last_selected) & (own != ABSENT)
    absent_last = key_positions(own).masked_fill_(~selected, LAST_POSITION + 1)
    ascending = absent_last.sort(dim=1).values
    return ascending.masked_fill_(ascending > LAST_POSITION, -1)


def compact_rows(positions: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The decode's selection: rows int32 [B, K] with tail -1, and valid int32 [B].

    positions: int64 [B, K] as from `selected_by_rank`; flat: int64 [B, K], the flat cache row of each (any value where
    absent). Flat rows must fit in int32.
    """
    present = positions >= 0
    rows = flat.masked_fill(~present, -1).to(torch.int32)
    return rows, present.sum(dim=1, dtype=torch.int32)


def global_topk(scores: torch.Tensor, width: int) -> torch.Tensor:
    """The selection by brute force, for the oracle: positions (int64, ascending) of the best `width` of all scores.

    scores: FP32 [context]; independent of the merge above but for the order of a candidate key.
    """
    keys = candidate_keys(scores, torch.arange(scores.numel(), device=scores.device))
    best = torch.topk(keys, min(width, keys.numel()), sorted=False).values
    return key_positions(best).sort().values


def check_row_range(pages: int, geometry: Geometry) -> bool:
    """Whether every flat row of a cache of `pages` pages fits the int32 of `rows`."""
    return pages * geometry.page_stride_rows <= 2**31 - 1
