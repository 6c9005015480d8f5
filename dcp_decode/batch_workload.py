"""The workload of a whole verify step as static shapes: what a captured graph can make from integers on the device.

    rows [B] (request, position, salt) --hash--> streams [layers, B] --mix--> keys    u8   [layers, B, 576]
                                                        |                     queries bf16 [layers, B, heads, 576]
    candidate positions [B, S], salts [B, S] -----------+------------------ scores  fp32 [layers, B, S]

The bits are those of `Workload`'s functions (a test compares them): only who hashes the names differs, the host there
and the device here. Every shape is fixed by (layers, B, S) and nothing is read back, so a step needs no host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_decode.workload import (
    EPOCH_TOKENS,
    PATTERN_WORDS,
    Purpose,
    Workload,
    hashed_words,
    is_heavy,
    make_words,
    scores_of_keys,
    token_words,
)

TOKEN_PURPOSES = (Purpose.KEY, Purpose.HEAVY, Purpose.QUERY)  # the first ones: they have a word for each token


@dataclass(frozen=True)
class BatchRows:
    """The rows of a step, int64 [B] each: request, position and salt of their own tokens.

    A row of padding has position -1: it sees no key, and what is made for it is never used.
    """

    request: torch.Tensor
    position: torch.Tensor
    salt: torch.Tensor

    def __len__(self) -> int:
        return len(self.request)


class BatchWorkload:
    """One step's own tokens in all layers, and each layer's index scores; lies on the device of the rows' tensors."""

    def __init__(self, workload: Workload, layers: int, rows: BatchRows) -> None:
        self.workload = workload
        self.layers = layers
        self.rows = rows
        device = rows.request.device
        layer = torch.arange(layers, dtype=torch.int64, device=device)[:, None]
        # Purposes together, for few launches: (purposes, layers, B), in the order of `Purpose`.
        streams = hashed_words(workload.purpose_states(device)[:, None, None], layer, rows.request)
        stream = dict(zip(Purpose, streams, strict=True))
        self._popularity = stream[Purpose.HEAVY]
        self._epoch = hashed_words(stream[Purpose.EPOCH], rows.position // EPOCH_TOKENS)
        self._noise = hashed_words(stream[Purpose.NOISE], rows.position, rows.salt)
        self._pattern = make_words(stream[Purpose.PATTERN].reshape(-1))[:, :PATTERN_WORDS]  # (layers * B, 8)
        words = token_words(streams[: len(TOKEN_PURPOSES)], rows.position, rows.salt)
        self._token_words = dict(zip(TOKEN_PURPOSES, words.flatten(1), strict=True))  # (layers * B) each

    def keys(self) -> torch.Tensor:
        """The rows' own keys as E4M3 bytes: uint8 [layers, B, 576]."""
        heavy = is_heavy(self._token_words[Purpose.HEAVY])
        encoded = self.workload.encode_keys(self._token_words[Purpose.KEY], heavy, self._pattern)
        return encoded.view(self.layers, len(self.rows), -1)

    def queries(self, heads: range) -> torch.Tensor:
        """BF16 [layers, B, len(heads), 576] of gathered head numbers `heads`."""
        made = self.workload.make_queries(self._token_words[Purpose.QUERY], self._pattern, heads)
        return made.view(self.layers, len(self.rows), *made.shape[1:])

    def index_scores(self, layers: slice, positions: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
        """FP32 [layers, ..., B, S] scores of the keys at `positions` (broadcast) with `salts`, int64 [..., B, S].

        Positions behind a row's own get a score too: the caller masks them.
        """

        def of_rows(streams: torch.Tensor) -> torch.Tensor:
            return streams[layers].view(-1, *[1] * (salts.dim() - 2), len(self.rows), 1)

        return scores_of_keys(
            token_words(of_rows(self._popularity), positions, salts),
            of_rows(self._epoch),
            of_rows(self._noise),
            self.rows.position[:, None],
            positions,
        )
