"""NCCL's way to exchange a layer: all-gather of the query bytes, all-to-all of the partial rows with their LSE."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from dcp_decode import numerics
from dcp_decode.checkpoint.peers.adapter import PeerFacts
from dcp_decode.checkpoint.timing import Series
from dcp_decode.control.plane import ControlPlane
from dcp_decode.fabric.multicast import NCCL, forbid_multicast
from dcp_decode.geometry import Geometry

GROUP_SECONDS = 120


class NcclExchange:
    """Of a group with a GPU a rank: moves the bytes that our mailboxes move, without any attention."""

    facts = PeerFacts(
        name="nccl",
        kind="public",
        bytes_per_key=0,
        lse_base="2",
        combine="not included: exchange only, an all-gather and an all-to-all",
        source="NCCL of torch",
    )

    def __init__(self, control: ControlPlane) -> None:
        forbid_multicast(os.environ, NCCL)
        store = torch.distributed.PrefixStore("nccl", control.torch_store())
        timeout = timedelta(seconds=GROUP_SECONDS)
        if torch.distributed.is_initialized():  # fabric symm_mem has made a gloo group
            self.group = torch.distributed.new_group(backend="nccl", timeout=timeout)
        else:
            torch.distributed.init_process_group(
                "nccl", store=store, rank=control.rank, world_size=control.size, timeout=timeout
            )
            self.group = torch.distributed.group.WORLD

    def launcher(self, geometry: Geometry, batch: int) -> Callable[[int], None]:
        """A launch of one layer's exchange of B rows."""
        own = (batch, geometry.owner_heads)
        query = torch.randint(0, 255, (*own, numerics.ROW_BYTES), dtype=torch.uint8, device="cuda")
        gathered = torch.empty((geometry.dcp, *query.shape), dtype=torch.uint8, device="cuda")
        # A BF16 row and its FP32 LSE: 514 elements of two bytes, by owner.
        partial = torch.randn((geometry.dcp, *own, numerics.LATENT_DIM + 2), device="cuda").to(torch.bfloat16)
        received = torch.empty_like(partial)

        def launch(_layer: int) -> None:
            torch.distributed.all_gather_into_tensor(gathered, query, group=self.group)
            torch.distributed.all_to_all_single(received, partial, group=self.group)

        return launch

    def close(self) -> None:
        """End the group; collective, when no graph of it is in use."""
        torch.distributed.destroy_process_group(self.group)

    def entry(self, series: Series) -> dict[str, Any]:
        """As contract section 7 has it: no attention, so no error and no keys."""
        return {
            "name": self.facts.name,
            "kind": self.facts.kind,
            **series.statistics(),
            "error": None,
            "bytes_per_key": None,
            "heads_padded_to": None,
            "lse_base": None,
            "skipped": None,
        }
