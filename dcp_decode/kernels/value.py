"""DcpValue: the merge of D sources in a rank's value mailbox, and on the local route the push into the owners'.

    merge, one CTA a (row, own head), 64 threads of 8 columns:

        LSE words [D] --wait--> weights exp2(lse - max)      payload words [D, 512] --wait--> sum by source --> BF16
             re-armed by one thread after a barrier               re-armed by the thread that read them

* LSE words come first: a source whose LSE is EMPTY_LSE pushes no payload, and its payload words are never used.
* The first loads of payload words are issued before the LSEs are known, and up to `EAGER_BATCH` rows before the use
  number is, for every generation: a load that turns out early, empty or of the other generation is dropped, and one
  latency less stands in the chain. Larger batches are bound by bytes and load one generation.

Measured (H200, solo, graph with programmatic dependent launch, B 5, 96 heads, D 8): merge 1.33 to 1.51 us, hot or cold;
push (3a) 0.81. Tried and dropped: a fence after the polls (not needed, see the kernel) 2.95, the same at the end 2.52.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from dcp_decode import numerics
from dcp_decode.kernels import arrival, disk_cache, memory, ptx
from dcp_decode.kernels.configs import ValueConfig
from dcp_decode.kernels.value_slots import ValueSlots, value_line
from dcp_decode.mailbox import MailboxLayout, Stage

WORDS = 4  # of a source's payload row that a thread merges, 16 bytes
ARMED = numerics.ARMED_WORD & 0xFFFFFFFF
EMPTY_LSE_WORD = numerics.EMPTY_LSE_BITS & 0xFFFFFFFF


class DcpValue:
    """The merge: stage 3 of the push route, 3b of the local route."""

    def __init__(self, config: ValueConfig) -> None:
        self.config = config
        self.slots = ValueSlots(config.geometry, WORDS)

    @cute.jit
    def __call__(self, region: Int64, rank: Int32, merged: Int64, deadline: Int64, stream: cuda.CUstream) -> None:
        """Launch; addresses as integers, see `launch.run_value`."""
        self.kernel(region, rank, merged, deadline).launch(
            grid=[self.config.geometry.owner_heads, self.config.batch, 1],
            block=[self.config.threads, 1, 1],
            use_pdl=self.config.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, region: Int64, rank: Int32, merged: Int64, deadline: Int64) -> None:
        config = self.config
        g = config.geometry
        sources = g.dcp
        thread, _, _ = cute.arch.thread_idx()
        head, row, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        use = arrival.read_use(region, int(Stage.MERGE))
        # First loads, in every generation if eager: lane l takes the LSE of (copy l / D, source l % D), every thread
        # its 16 bytes of all sources' payload rows. What turns out empty or of the other generation is dropped.
        lane = thread % 32
        source_of_lane = lane % sources
        generation = use % g.generations
        copies = g.generations if cutlass.const_expr(config.eager) else 1
        lse_copy = ptx.minimum_int32(lane // sources, Int32(copies - 1)) if config.eager else generation
        lse_word = memory.load_word_system(self.slots.lse_address(region, lse_copy, source_of_lane, row, head))
        early = cute.make_rmem_tensor(copies * sources * 4, Uint32)
        for copy in cutlass.range_constexpr(copies):
            for source in cutlass.range_constexpr(sources):
                loaded_from = Int32(copy) if config.eager else generation
                loaded = memory.load_words_system(
                    self.slots.payload_address(region, loaded_from, source, row, head, thread)
                )
                for element in cutlass.range_constexpr(4):
                    early[(copy * sources + source) * 4 + element] = loaded[element]

        # Lane s < D waits for the LSE word of source s; then every lane has all of them.
        first_lane = generation * sources if config.eager else Int32(0)
        one = cute.make_rmem_tensor(1, Uint32)
        one[0] = ptx.shuffle(lse_word, first_lane + source_of_lane)
        aborted = arrival.wait_words(
            one,
            self.slots.lse_address(region, generation, source_of_lane, row, head),
            region,
            rank,
            use,
            deadline,
            int(Stage.MERGE),
            source_of_lane,
            row,
            head,
            Int32(0),
            1,
        )
        lse = [ptx.shuffle(one[0], Int32(source)) for source in range(sources)]
        wanted = cute.make_rmem_tensor(sources, Int32)
        words = cute.make_rmem_tensor(4 * sources, Uint32)
        for source in cutlass.range_constexpr(sources):
            wanted[source] = Int32(1)
            if (lse[source] == Uint32(EMPTY_LSE_WORD)) | (lse[source] == Uint32(ARMED)):
                wanted[source] = Int32(0)
            for element in cutlass.range_constexpr(4):
                words[4 * source + element] = early[4 * source + element]
                if cutlass.const_expr(config.eager):  # noqa: SIM102 (a static and a dynamic condition)
                    if generation == 1:
                        words[4 * source + element] = early[4 * (sources + source) + element]
        aborted = aborted | arrival.wait_places(
            words,
            wanted,
            self.places,
            self.slots.payload_address(region, generation, 0, row, head, thread),
            region,
            rank,
            use,
            deadline,
            int(Stage.MERGE),
            row,
            head,
            thread * 4,
        )
        # No fence here: values carry nothing that this rank's next pushes could depend on, and its next query push
        # fences its re-arms (docs/protocol.md, section 5, `no_fence_after_polls_in_stage_3`: safe).
        # Every thread of this CTA has the LSE words, and knows whether a wait of another has expired.
        aborted_threads = ptx.barrier_any(aborted)
        if aborted_threads == 0:
            self.merge(lse, words, wanted, region, generation, row, head, thread, merged)
        if (head == 0) & (row == 0) & (thread == 0):
            # The stage before has completed (dependency wait): its use is over.
            arrival.advance_use(region, int(Stage.SPARSE if config.push else Stage.PUSH))

    @cute.jit
    def merge(
        self,
        lse: Any,
        words: cute.Tensor,
        wanted: cute.Tensor,
        region: Int64,
        generation: Int32,
        row: Int32,
        head: Int32,
        thread: Int32,
        merged: Int64,
    ) -> None:
        """Re-arm this thread's words and write its 8 merged columns, in source order."""
        g = self.config.geometry
        sources = g.dcp
        armed = Uint32(ARMED)
        if thread < sources:
            memory.store_word_system(self.slots.lse_address(region, generation, thread, row, head), armed)
        largest = Float32(float("-inf"))
        for source in cutlass.range_constexpr(sources):
            largest = ptx.maximum(largest, ptx.bits_float(lse[source]))
        weight_sum = Float32(0.0)
        sums = cute.make_rmem_tensor(self.config.columns_a_thread, Float32)
        sums.fill(0.0)
        for source in cutlass.range_constexpr(sources):
            if wanted[source] != 0:
                weight = ptx.exp2(ptx.add(ptx.bits_float(lse[source]), -largest))
                weight_sum = ptx.add(weight_sum, weight)
                for element in cutlass.range_constexpr(4):
                    values = ptx.bf16_values(words[4 * source + element])
                    for half in cutlass.range_constexpr(2):
                        column = 2 * element + half
                        sums[column] = ptx.multiply_add(weight, values[half], sums[column])
                place = self.slots.payload_address(region, generation, source, row, head, thread)
                memory.store_words_system(place, [armed, armed, armed, armed])
        divisor = weight_sum
        if weight_sum == Float32(0.0):  # all sources are empty
            divisor = Float32(1.0)
        pairs = [
            ptx.bf16_pair_canonical(ptx.divide(sums[2 * index], divisor), ptx.divide(sums[2 * index + 1], divisor))
            for index in range(4)
        ]
        line = Int64(row) * g.owner_heads + Int64(head)
        memory.store_global(merged + line * (2 * numerics.LATENT_DIM) + Int64(thread) * 16, pairs)

    @property
    def places(self) -> tuple[arrival.Place, ...]:
        """What a thread waits for: its 16 bytes of every source's payload row."""
        return tuple(
            arrival.Place(source, source * self.slots.source_bytes) for source in range(self.config.geometry.dcp)
        )


class DcpValuePush:
    """Stage 3a of the local route: latent rows and base-2 LSEs into their owners' value mailboxes."""

    def __init__(self, config: ValueConfig) -> None:
        self.config = config
        self.layout = MailboxLayout(config.geometry)

    @cute.jit
    def __call__(
        self, region: Int64, table: Int64, rank: Int32, latent: Int64, lse: Int64, stream: cuda.CUstream
    ) -> None:
        """Launch; addresses as integers, see `launch.run_value_push`."""
        self.kernel(region, table, rank, latent, lse).launch(
            grid=[self.config.geometry.heads, self.config.batch, 1],
            block=[self.config.threads, 1, 1],
            use_pdl=self.config.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, region: Int64, table: Int64, rank: Int32, latent: Int64, lse: Int64) -> None:
        g = self.config.geometry
        thread, _, _ = cute.arch.thread_idx()
        head, row, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        use = arrival.read_use(region, int(Stage.PUSH))
        if (head == 0) & (row == 0) & (thread == 0):
            arrival.advance_use(region, int(Stage.SPARSE))
        line = Int64(row) * g.padded_heads + Int64(head)
        owner = head // g.owner_heads
        base = memory.load_global_int64(table + Int64(owner) * 8)
        aborted = arrival.read_abort(region)
        lse_ln = ptx.bits_float(Uint32(memory.load_global_int32(lse + line * 4)))
        words = memory.load_global_words(latent + line * (2 * numerics.LATENT_DIM) + Int64(thread) * 16)
        slot = value_line(g, use % g.generations, rank, row, head - owner * g.owner_heads)
        # The latent rows are stage 2's outputs, NaN already canonical; the product below may not keep a NaN's bits.
        lse_log2 = ptx.multiply(lse_ln, Float32(numerics.LOG2_E))
        word = ptx.replace_if_nan(ptx.float_bits(lse_log2), lse_ln, numerics.FP32_NAN)
        # After an expired wait nothing is pushed: the latent rows may not be this use's.
        if (word != Uint32(EMPTY_LSE_WORD)) & (aborted == 0):
            place = base + slot * (2 * numerics.LATENT_DIM) + Int64(thread) * 16 + self.layout.payload.offset
            memory.store_words_system(place, words)
        if (thread == 0) & (aborted == 0):
            memory.store_word_system(base + slot * 4 + self.layout.lse_log2.offset, word)


@cache
def compile_value(config: ValueConfig) -> disk_cache.JitKernel:
    """The compiled merge of a configuration (cached)."""
    return disk_cache.compile_kernel(DcpValue(config), value_arguments())


@cache
def compile_value_push(config: ValueConfig) -> disk_cache.JitKernel:
    """The compiled push (3a) of a configuration (cached)."""
    return disk_cache.compile_kernel(DcpValuePush(config), value_push_arguments())


def value_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled merge, without the stream."""
    return (Int64(0), Int32(0), Int64(0), Int64(0))


def value_push_arguments() -> tuple[Any, ...]:
    """Typed arguments of the compiled push, without the stream."""
    return (Int64(0), Int64(0), Int32(0), Int64(0), Int64(0))
