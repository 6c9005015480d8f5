"""What a user would run instead, timed in the same run: one adapter a module, listed here."""

from __future__ import annotations

from dcp_decode.checkpoint.peers.adapter import Candidate, Peer, PeerFacts, PeerSkipped
from dcp_decode.checkpoint.peers.flash_mla import FlashMlaSparseDecode, FlashMlaSparsePrefill
from dcp_decode.checkpoint.peers.flashinfer_fa3 import FlashInferFa3
from dcp_decode.checkpoint.peers.own_local_route import OwnLocalRoute
from dcp_decode.checkpoint.peers.plain_torch import PlainTorch
from dcp_decode.checkpoint.peers.triton_split_kv import TritonSplitKv

__all__ = ["ALL_PEERS", "QUICK_PEERS", "Candidate", "Peer", "PeerFacts", "PeerSkipped"]

ALL_PEERS: tuple[Peer, ...] = (
    OwnLocalRoute(),
    TritonSplitKv(),
    FlashMlaSparseDecode(),
    FlashMlaSparsePrefill(),
    FlashInferFa3(),
    PlainTorch(),
)
QUICK_PEERS: tuple[Peer, ...] = (TritonSplitKv(),)
