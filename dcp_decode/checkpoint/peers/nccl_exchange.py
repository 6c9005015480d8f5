"""NCCL's way to exchange a layer: all-gather of the query bytes, all-to-all of the partial rows with their LSE."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    chain_facts = replace(
        facts, name="nccl_chain", bytes_per_key=numerics.ROW_BYTES, combine="our own kernels, joined by NCCL"
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

    def gather(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """All-gathers in one group call. rows: (uint8 [D, n] contiguous, this rank's row of it)."""
        with torch.distributed._coalescing_manager(self.group, device=rows[0][0].device):
            for everyone, own in rows:
                torch.distributed.all_gather_into_tensor(everyone.view(-1), own, group=self.group)

    def exchange(
        self, sent: Mapping[int, Sequence[torch.Tensor]], received: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """All sends and receives in one group call; contiguous tensors by peer, in the same order on both sides."""
        operations = [
            torch.distributed.P2POp(operation, tensor, group=self.group, group_peer=peer)
            for operation, tensors in ((torch.distributed.isend, sent), (torch.distributed.irecv, received))
            for peer, many in tensors.items()
            for tensor in many
        ]
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()

    def close(self) -> None:
        """End the group; collective, when no graph of it is in use."""
        torch.distributed.destroy_process_group(self.group)

    def entry(self, series: Series) -> dict[str, Any]:
        """Of the exchange alone, as contract section 7 has it: no attention, so no error and no keys."""
        return self._entry(self.facts, series) | {"bytes_per_key": None, "lse_base": None}

    def chain_entry(self, series: Series) -> dict[str, Any]:
        """Of the chain of our kernels over NCCL, whose rows have the bits of ours."""
        return self._entry(self.chain_facts, series)

    @staticmethod
    def _entry(facts: PeerFacts, series: Series) -> dict[str, Any]:
        return {
            "name": facts.name,
            "kind": facts.kind,
            **series.statistics(),
            "error": None,
            "bytes_per_key": facts.bytes_per_key,
            "heads_padded_to": None,
            "lse_base": facts.lse_base,
            "skipped": None,
        }
