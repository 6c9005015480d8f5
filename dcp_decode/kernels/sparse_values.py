"""Values of the exchange of probabilities: this CTA's latent columns, summed over the keys of all CTAs of a round.

A compute warp has 16 columns, and FP32 sums of them in registers; the order of the sums is `sparse_probabilities`'s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from dcp_decode.geometry import HEAD_TILE
from dcp_decode.kernels import memory, ptx
from dcp_decode.kernels.sparse_arguments import Worker
from dcp_decode.kernels.sparse_chunk import VALUE_STEP, probability_operands, transposed_values
from dcp_decode.kernels.sparse_config import COMPUTE_WARPS
from dcp_decode.kernels.sparse_gather import ROW_BLOCK, ROW_STEP, SparseGather
from dcp_decode.kernels.sparse_outputs import SparseOutputs
from dcp_decode.kernels.sparse_shared import BLOCK, COLUMNS, SPLIT

WARP_COLUMNS = COLUMNS // COMPUTE_WARPS  # what one ldmatrix.trans of bytes covers
assert WARP_COLUMNS == 16
BLOCK_STEPS = range(BLOCK // VALUE_STEP)


class State(NamedTuple):
    """What a compute warp keeps over the rounds of a row, FP32 registers.

    sums: (tiles, 2 parities, 4) of m16n8, [0], [1] head g, [2], [3] head g + 8, columns 4 q + parity and + 2 of the
    warp's 16. largest: (tiles, 2) maxima M of heads g, g + 8 that they are scaled to. running_max, running_sum:
    `SparseChunk.probabilities`'.
    """

    sums: Any
    largest: Any
    running_max: Any
    running_sum: Any


class Places(NamedTuple):
    """A lane's addresses in a block: values and P of CTA 0, head g, and the maxima of head g.

    swap: 32 where the two 32-byte halves of P are swapped (`send_probabilities`), else 0.
    """

    values: Any
    probabilities: Any
    maxima: Any
    swap: Any


class SparseValues(SparseGather, SparseOutputs):
    """P . V of a round, for the compute warps of `SparseProbabilities`."""

    def expect_probabilities(self, barriers: Any, parity: Any, more_steps: Any) -> None:
        """One thread: arm a round's barrier for P and maximum of every head of every CTA."""
        layout = self.config.probabilities_layout
        barrier = barriers + (layout.probability_barrier(0) // 8 + parity)
        step_bytes = layout.probability_bytes // len(BLOCK_STEPS)
        expected = layout.maxima_bytes + layout.probability_bytes + more_steps * step_bytes
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)

    def more_steps(self, count: Any) -> Any:
        """32-key steps that the rounds of a row of `count` keys have in their second block: 0, 1 or 2."""
        more = (count - ROW_BLOCK + (ROW_STEP - 1)) >> (ROW_STEP.bit_length() - 1)
        return ptx.minimum_int32(ptx.maximum_int32(more, Int32(0)), Int32(len(BLOCK_STEPS)))

    @cute.jit
    def values_of_round(
        self, more_steps: cutlass.Constexpr, state: State, number: Int32, rounds: Int32, worker: Worker
    ) -> None:
        """sums += w_c P_c . V_c over the CTAs; before it waits for P, the last round sends the statistics."""
        layout = self.config.probabilities_layout
        parity = number & 1
        values = self.wait_for_values(number * self.config.blocks, worker)
        early = self.early_values(values)
        if number + 1 == rounds:
            self.send_statistics(state.running_max, state.running_sum, worker)
        self.wait_for_probabilities(number, early, worker)
        if (worker.thread == 0) & (number + 2 < rounds):
            self.expect_probabilities(worker.barriers, parity, more_steps)
        head = worker.lane // 4
        maxima = worker.shared + layout.maxima + parity * layout.maxima_bytes + head * (SPLIT * 4)
        self.take(state.sums, 0, 8 * self.config.tiles, worker)
        running = [self.rescale_sums(state, tile, maxima) for tile in range(self.config.tiles)]
        # Where `send_probabilities` put the two 32-byte halves of a head.
        swap = head // 2 % 2 * VALUE_STEP
        line = worker.shared + layout.probabilities + parity * (self.config.blocks * layout.probability_bytes)
        line = line + head * BLOCK + worker.lane % 4 * 8
        places = Places(values, line, maxima, swap)
        if cutlass.const_expr(more_steps > 0):
            self.wait_for_values(number * self.config.blocks + 1, worker)
        at_once = self.ctas_at_once
        for first in cutlass.range_constexpr(0, SPLIT, at_once):
            ctas = range(first, first + at_once)
            self.values_of_ctas(more_steps, state, early, places, ctas, self.kept(running, more_steps))
        self.keep(state.sums, 0, 8 * self.config.tiles, worker)

    def wait_for_values(self, block: Any, worker: Worker) -> Any:
        """Until the values of a block are in their buffer; a lane's address in those of CTA 0."""
        layout = self.config.probabilities_layout
        slot = self.slot(block)
        memory.wait_barrier(worker.shared + layout.value_barrier(0) + slot * 8, self.phase(block))
        values = worker.shared + layout.values + slot * layout.value_bytes
        return values + worker.lane * layout.value_pitch + worker.warp * WARP_COLUMNS

    def keep(self, registers: Any, first: int, count: int, worker: Worker) -> None:
        """Three tiles keep FP32 registers in shared memory between their uses: words `first` .. of a lane."""
        if self.config.probabilities_layout.kept_slots:
            for index in range(count):
                memory.store_shared(self.kept_place(first + index, worker), [registers[index]])

    def take(self, registers: Any, first: int, count: int, worker: Worker) -> None:
        """What `keep` kept."""
        if self.config.probabilities_layout.kept_slots:
            for index in range(count):
                registers[index] = memory.load_shared(self.kept_place(first + index, worker), 1)[0]

    def kept_place(self, word: int, worker: Worker) -> Any:
        """Address of a lane's word."""
        layout = self.config.probabilities_layout
        return worker.shared + layout.kept + worker.warp * (layout.kept_slots * 512) + word * 128 + worker.lane * 4

    def wait_for_probabilities(self, number: Any, early: Any, worker: Worker) -> None:
        """Until P of a round has come from all CTAs; `early`: operands that shall be ready by then."""
        layout = self.config.probabilities_layout
        ready = [word for cta in early for step in cta for column in step for pair in column for word in pair]
        barrier = worker.shared + layout.probability_barrier(0) + (number & 1) * 8
        memory.wait_barrier(barrier, (number >> 1) & 1, ready, worker.shared + layout.scratch + worker.thread * 4)

    def early_values(self, place: Any) -> list[Any]:
        """Operands that are loaded and unpacked before the wait for P, where there are registers: of the first CTAs.

        Those of the other CTAs are unpacked while the products of the first ones wait for each other.
        """
        return [self.value_operands(place, cta) for cta in range(self.ctas_at_once if self.config.tiles == 1 else 0)]

    def value_operands(self, place: Any, cta: int, steps: range = BLOCK_STEPS) -> list[Any]:
        """f16 operands [steps][2 parities][2 mma] of one CTA's keys; `place`: a lane's address in those of CTA 0."""
        rows = [cta * BLOCK + step * VALUE_STEP for step in steps]
        pitch = self.config.probabilities_layout.value_pitch
        words = [memory.load_matrices(place + row * pitch, 4, transposed=True) for row in rows]
        return [transposed_values(step_words) for step_words in words]

    def rescale_sums(self, state: State, tile: int, maxima: Any) -> list[list[Any]]:
        """Take a tile's sums to the largest maximum so far; returns the CTAs' maxima of heads g, g + 8.

        maxima: a lane's address of those of head g.
        """
        running = [memory.load_shared(maxima + head_offset(tile, half) * (SPLIT * 4), SPLIT) for half in range(2)]
        for half in range(2):
            before = state.largest[tile * 2 + half]
            after = before
            for maximum in running[half]:
                after = ptx.maximum(after, maximum)
            factor = ptx.exp2(ptx.add(before, -after))
            state.largest[tile * 2 + half] = after
            for element in elements(tile, half):
                state.sums[element] = ptx.multiply(state.sums[element], factor)
        return running

    def kept(self, running: Any, more_steps: int) -> Any:
        """What one tile keeps in registers; several, and whole second blocks, load it again."""
        return running if self.config.tiles == 1 and more_steps < 2 else None

    @property
    def ctas_at_once(self) -> int:
        """CTAs whose products are interleaved where registers allow: one chain of mma waits for its own latency."""
        return 2 if self.config.tiles == 1 else 1

    def values_of_ctas(
        self, more_steps: int, state: State, early: Any, places: Places, ctas: range, running: Any
    ) -> None:
        """The same for some CTAs, in order."""
        layout = self.config.probabilities_layout
        values = {cta: early[cta] if cta < len(early) else self.value_operands(places.values, cta) for cta in ctas}
        for tile in range(self.config.tiles):
            current = {(cta, column): [Float32(0.0)] * 4 for cta in ctas for column in range(2)}
            for step in range(2 + more_steps):
                block, within = divmod(step, len(BLOCK_STEPS))
                if block:  # loaded late, or they would take too many registers
                    later = places.values + block * layout.value_bytes
                    own = {cta: self.value_operands(later, cta, range(within, within + 1))[0] for cta in ctas}
                else:
                    own = {cta: values[cta][within] for cta in ctas}
                offset = VALUE_STEP - places.swap if within else places.swap
                heads = places.probabilities + tile * (HEAD_TILE * BLOCK) + offset + block * layout.probability_bytes
                sender = layout.outgoing_bytes
                operands = {cta: probability_operands(heads + cta * sender, BLOCK) for cta in ctas}
                for half_step in range(2):
                    for cta, column in current:
                        value = own[cta][column][half_step]
                        current[cta, column] = ptx.mma_f16(operands[cta][half_step], value, current[cta, column])
            for cta in ctas:
                for half in range(2):
                    if running:
                        maximum = running[tile][half][cta]
                    else:
                        place = places.maxima + head_offset(tile, half) * (SPLIT * 4) + cta * 4
                        maximum = memory.load_shared(place, 1)[0]
                    weight = ptx.exp2(ptx.add(maximum, -state.largest[tile * 2 + half]))
                    for element in elements(tile, half):
                        value = current[cta, element // 4 % 2][element % 4]
                        state.sums[element] = ptx.multiply_add(weight, value, state.sums[element])


def elements(tile: int, half: int) -> list[int]:
    """Indices of `sums` that belong to head g (half 0) or g + 8."""
    return [tile * 8 + column * 4 + half * 2 + offset for column in range(2) for offset in range(2)]


def head_offset(tile: int, half: int) -> int:
    """Lines from head g of a CTA's first tile to head g (half 0) or g + 8 of another."""
    return tile * HEAD_TILE + half * 8
