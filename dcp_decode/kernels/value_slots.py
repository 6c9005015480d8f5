"""Where the words of a (generation, source, row, own head) lie in an owner's value mailbox, for values of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int64

from dcp_decode import numerics
from dcp_decode.geometry import Geometry
from dcp_decode.mailbox import MailboxLayout


def value_line(geometry: Geometry, generation: Any, source: Any, row: Any, head: Any) -> Any:
    """Line of (generation, source, row, own head): LSE words and payload rows have the same."""
    slot = Int64(generation * geometry.dcp + source) * geometry.capacity + Int64(row)
    return slot * geometry.owner_heads + Int64(head)


@dataclass(frozen=True)
class ValueSlots:
    """words: 32-bit payload words of a thread, two columns each, adjacent; a row has them by thread."""

    geometry: Geometry
    words: int

    @property
    def layout(self) -> MailboxLayout:
        return MailboxLayout(self.geometry)

    @property
    def source_bytes(self) -> int:
        """Bytes from one source's payload slot to the next source's."""
        g = self.geometry
        return g.capacity * g.owner_heads * 2 * numerics.LATENT_DIM

    def lse_address(self, region: Any, generation: Any, source: Any, row: Any, head: Any) -> Any:
        """Address of one LSE word."""
        return region + value_line(self.geometry, generation, source, row, head) * 4 + self.layout.lse_log2.offset

    def payload_address(self, region: Any, generation: Any, source: Any, row: Any, head: Any, thread: Any) -> Any:
        """Address of a thread's words of a payload row."""
        line = value_line(self.geometry, generation, source, row, head) * (2 * numerics.LATENT_DIM)
        return region + line + Int64(thread) * (4 * self.words) + self.layout.payload.offset
