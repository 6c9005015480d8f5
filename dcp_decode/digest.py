"""The digest of merged rows: what runs on other fabrics, launchers and ranks are compared by."""

from __future__ import annotations

import hashlib

import torch

DIGEST_BYTES = 32


def rows_digest(rows: torch.Tensor) -> bytes:
    """SHA-256 of the bytes of a tensor on the host."""
    return hashlib.sha256(row_bytes(rows)).digest()


def row_bytes(rows: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, in the order of its indices."""
    return rows.contiguous().view(torch.uint8).flatten().numpy().data
