"""The digest kernel's arithmetic without a GPU: its own functions on integers of 32 bits, against hashlib."""

from __future__ import annotations

import hashlib

import pytest
import torch

pytest.importorskip("cutlass")

from dcp_decode.cpu.stages import CpuStages
from dcp_decode.digest import DIGEST_BYTES, rows_digest
from dcp_decode.kernels import digest


class Word(int):
    """An unsigned integer of 32 bits, as a kernel's Uint32."""

    def __new__(cls, value: int) -> Word:
        return super().__new__(cls, value & 0xFFFFFFFF)


def _wrapped(name: str):
    return lambda self, *others: Word(getattr(int, name)(self, *others))


for _name in ("add", "and", "or", "xor", "invert", "rshift", "lshift"):
    setattr(Word, f"__{_name}__", _wrapped(f"__{_name}__"))


@pytest.fixture(autouse=True)
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "Uint32", Word)
    monkeypatch.setattr(digest.ptx, "rotate_right", lambda word, bits: Word(word >> bits | word << 32 - bits))


def of_message(message: bytes) -> bytes:
    """SHA-256 of whole blocks by the kernel's functions, in the kernel's order."""
    padding = [digest.END_OF_MESSAGE] + [0] * 13 + [8 * len(message) >> 32, 8 * len(message)]
    data = message + b"".join(Word(word).to_bytes(4, "big") for word in padding)
    state = [Word(word) for word in digest.INITIAL]
    constants = digest.round_constants()
    for start in range(0, len(data), digest.BLOCK_BYTES):
        words = [Word(int.from_bytes(data[start + at : start + at + 4], "big")) for at in range(0, 64, 4)]
        schedule = [word + Word(constant) for word, constant in zip(digest._schedule(words), constants, strict=True)]
        state = [before + after for before, after in zip(state, digest._compressed(state, schedule), strict=True)]
    return b"".join(word.to_bytes(4, "big") for word in state)


@pytest.mark.parametrize("blocks", [0, 1, 2, 5, 33])
def test_schedule_and_rounds_are_those_of_sha_256(blocks):
    message = bytes(torch.randint(256, (64 * blocks,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    assert of_message(message) == hashlib.sha256(message).digest()


def test_a_wrong_round_constant_is_seen(monkeypatch):
    constants = digest.round_constants()
    constants[63] ^= 1
    monkeypatch.setattr(digest, "round_constants", lambda: constants)
    assert of_message(b"") != hashlib.sha256(b"").digest()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_of_padding_are_in_no_digest(rows):
    merged = torch.randn(2, 3, 3, 4, 512).to(torch.bfloat16)
    digests = torch.zeros(2, 3, DIGEST_BYTES, dtype=torch.uint8)
    CpuStages.digest(None, merged, torch.tensor(rows), digests)
    for layer, rank in ((0, 0), (1, 2)):
        real = merged[layer, rank, :rows]
        assert (
            bytes(digests[layer, rank])
            == rows_digest(real)
            == hashlib.sha256(bytes(real.view(torch.uint8).flatten())).digest()
        )
