"""What NVLink would add to a layer that was timed on one GPU: a model, kept apart from what was measured.

A layer crosses the wire twice: every rank's query heads go to all peers, and every rank's partial rows go to their
owners. Both payloads are their own arrival flags, so one crossing costs what the same pattern took between two H200
over NVLink (NV18), one way, payload polled word by word: nearly flat up to half a megabyte, then the bandwidth of a
peer copy. On one GPU the words lie ready in L2, so a solo time holds none of it; overlap with other work is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_decode import numerics
from dcp_decode.geometry import Geometry

# (bytes, microseconds one way), measured between two H200 of one host.
MEASURED_HOPS = ((8 * 1024, 0.737), (32 * 1024, 0.716), (480 * 1024, 0.764))
PEER_BYTES_PER_MICROSECOND = 394e3  # of a 256 MiB peer copy
SOURCE = "payload-as-flag between two H200 (NV18), one way: 0.716 to 0.764 us for 8 to 480 KB; peer copy 394 GB/s"


@dataclass(frozen=True)
class Wire:
    """Bytes that leave a rank and modelled microseconds of both crossings of a layer."""

    query_bytes: int
    value_bytes: int
    query_us: float
    value_us: float

    @property
    def layer_us(self) -> float:
        return self.query_us + self.value_us


def hop_us(nbytes: int) -> float:
    """Modelled microseconds one way of a payload that leaves one GPU."""
    sizes, times = (np.array(column, dtype=float) for column in zip(*MEASURED_HOPS, strict=True))
    beyond = max(0.0, nbytes - sizes[-1]) / PEER_BYTES_PER_MICROSECOND
    return float(np.interp(nbytes, sizes, times)) + beyond


def wire_of(geometry: Geometry, batch: int) -> Wire:
    """Both crossings of a layer of B rows; nothing crosses with one rank."""
    others = geometry.dcp - 1
    if others == 0:
        return Wire(0, 0, 0.0, 0.0)
    query = others * batch * geometry.owner_heads * numerics.ROW_BYTES
    value = others * batch * geometry.owner_heads * (2 * numerics.LATENT_DIM + 4)
    return Wire(query, value, hop_us(query), hop_us(value))
