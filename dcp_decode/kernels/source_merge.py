"""The merge of the D sources of one (row, own head) by a group of threads of the fused chain.

    lane s: LSE word of source s ----+--all arrived--> weights exp2(lse - max) --+
    thread: its columns of D sources +                                           +--> sum in source order --> BF16

The LSEs decide: a source whose LSE is EMPTY_LSE pushes no payload, and its payload words are neither waited for nor
used. Payload words are loaded along with the LSEs all the same: a value that is there costs one latency, not two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.geometry import Geometry
from dcp_decode.kernels import memory, polling, ptx
from dcp_decode.kernels.value_slots import ValueSlots


@dataclass(frozen=True)
class SourceMerge:
    """Addresses and arithmetic of the merge for one geometry; threads: of a group, 64 or 128."""

    geometry: Geometry
    threads: int

    @property
    def words(self) -> int:
        """32-bit words, of two columns each, that a thread merges: adjacent in each source's payload row."""
        return numerics.LATENT_DIM // 2 // self.threads

    @property
    def slots(self) -> ValueSlots:
        return ValueSlots(self.geometry, self.words)

    def load(self, region: Any, generation: Any, row: Any, head: Any, thread: Any) -> tuple[Any, cute.Tensor]:
        """First loads of a thread: the LSE word of source thread % 32 % D, and Uint32 [D x words] of payload."""
        payload = cute.make_rmem_tensor(self.words * self.geometry.dcp, Uint32)
        for source in range(self.geometry.dcp):
            loaded = memory.load_words_system(
                self.slots.payload_address(region, generation, source, row, head, thread), self.words
            )
            for element in range(self.words):
                payload[source * self.words + element] = loaded[element]
        source = thread % 32 % self.geometry.dcp
        return memory.load_word_system(self.slots.lse_address(region, generation, source, row, head)), payload

    @cute.jit
    def receive(
        self,
        waiter: polling.Waiter,
        own_lse: Any,
        payload: cute.Tensor,
        row: Any,
        head: Any,
        thread: Any,
        merged: Any,
        barrier: Any,
    ) -> None:
        """Wait for all sources of (row, head), re-arm their words and write the merged row.

        own_lse, payload: first loads, as those of `load`. barrier: named barrier of the group. Nothing is re-armed or
        written where a wait has expired.
        """
        generation = waiter.use % self.geometry.generations
        source = thread % 32 % self.geometry.dcp
        lse = cute.make_rmem_tensor(self.geometry.dcp, Uint32)
        aborted = polling.wait_sources(
            waiter,
            own_lse,
            lse,
            payload,
            self.geometry.dcp,
            self.slots.lse_address(waiter.region, generation, source, row, head),
            self.slots.payload_address(waiter.region, generation, 0, row, head, thread),
            self.slots.source_bytes,
            row,
            head,
            thread * self.words,
            self.words,
        )
        # Every thread of the group has its words, and knows whether a wait of another has expired.
        aborted_threads = ptx.barrier_any(aborted, barrier, self.threads)
        if aborted_threads == 0:
            self.merge(waiter.region, generation, lse, payload, row, head, thread, merged)

    @cute.jit
    def merge(
        self,
        region: Any,
        generation: Any,
        lse: cute.Tensor,
        payload: cute.Tensor,
        row: Any,
        head: Any,
        thread: Any,
        merged: Any,
    ) -> None:
        """Write this thread's merged columns, summed in source order, and re-arm its words."""
        sources = self.geometry.dcp
        largest = Float32(float("-inf"))
        for source in cutlass.range_constexpr(sources):
            largest = ptx.maximum(largest, ptx.bits_float(lse[source]))
        # All weights first, and no store between the sums: then no source waits for the latencies of another.
        weights = [ptx.exp2(ptx.add(ptx.bits_float(lse[source]), -largest)) for source in range(sources)]
        weight_sum = Float32(0.0)
        sums = cute.make_rmem_tensor(2 * self.words, Float32)
        sums.fill(0.0)
        for source in cutlass.range_constexpr(sources):
            if lse[source] != Uint32(polling.EMPTY_LSE):
                weight_sum = ptx.add(weight_sum, weights[source])
                for element in cutlass.range_constexpr(self.words):
                    values = ptx.bf16_values(payload[self.words * source + element])
                    for half in cutlass.range_constexpr(2):
                        column = 2 * element + half
                        sums[column] = ptx.multiply_add(weights[source], values[half], sums[column])
        divisor = weight_sum
        if weight_sum == Float32(0.0):  # all sources are empty
            divisor = Float32(1.0)
        pairs = [
            ptx.bf16_pair_canonical(ptx.divide(sums[2 * index], divisor), ptx.divide(sums[2 * index + 1], divisor))
            for index in range(self.words)
        ]
        line = Int64(row) * self.geometry.owner_heads + Int64(head)
        memory.store_global(merged + line * (2 * numerics.LATENT_DIM) + Int64(thread) * (4 * self.words), pairs)
        armed = Uint32(polling.ARMED)
        if thread < sources:
            memory.store_word_system(self.slots.lse_address(region, generation, thread, row, head), armed)
        for source in cutlass.range_constexpr(sources):
            if lse[source] != Uint32(polling.EMPTY_LSE):
                place = self.slots.payload_address(region, generation, source, row, head, thread)
                memory.store_words_system(place, [armed] * self.words)
