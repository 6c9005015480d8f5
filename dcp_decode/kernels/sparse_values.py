"""Values of the exchange of probabilities: this CTA's latent columns, summed over the keys of all CTAs of a round.

A compute warp has 16 columns, and FP32 sums of them in registers; the order of the sums is `sparse_probabilities`'s.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from dcp_decode.geometry import HEAD_TILE
from dcp_decode.kernels import ptx
from dcp_decode.kernels.sparse_arguments import Worker
from dcp_decode.kernels.sparse_chunk import VALUE_STEP, probability_operands, transposed_values
from dcp_decode.kernels.sparse_config import COMPUTE_WARPS
from dcp_decode.kernels.sparse_gather import SparseGather
from dcp_decode.kernels.sparse_outputs import SparseOutputs
from dcp_decode.kernels.sparse_shared import CHUNK, COLUMNS, SPLIT

WARP_COLUMNS = COLUMNS // COMPUTE_WARPS  # what one ldmatrix.trans of bytes covers
assert WARP_COLUMNS == 16


class SparseValues(SparseGather, SparseOutputs):
    """P . V of a round, for the compute warps of `SparseProbabilities`."""

    @property
    def probability_tx(self) -> int:
        """Bytes that the barrier of a round counts: P and maximum of every head of every CTA."""
        return SPLIT * self.config.head_rows * (CHUNK + 4)

    @cute.jit
    def values_of_round(
        self,
        sums: cute.Tensor,
        largest: cute.Tensor,
        running_max: cute.Tensor,
        running_sum: cute.Tensor,
        number: Int32,
        rounds: Int32,
        worker: Worker,
    ) -> None:
        """sums += w_c P_c . V_c over the CTAs; before it waits for P, the last round sends the statistics.

        sums: (tiles, 2 parities, 4) FP32 of m16n8, [0], [1] head g, [2], [3] head g + 8, columns 4 q + parity and + 2
        of the warp's 16. largest: (tiles, 2) maxima M of heads g, g + 8 that they are scaled to.
        """
        layout = self.config.probabilities_layout
        buffer, parity = self.buffer(number), number & 1
        ptx.wait_barrier(worker.shared + layout.value_barrier(0) + buffer * 8, self.phase(number))
        values = worker.shared + layout.values + buffer * layout.value_bytes
        values = values + worker.lane * layout.value_pitch + worker.warp * WARP_COLUMNS
        early = self.early_values(values)
        if number + 1 == rounds:
            self.send_statistics(running_max, running_sum, worker)
        self.wait_for_probabilities(number, early, worker)
        if (worker.thread == 0) & (number + 2 < rounds):
            barrier = worker.barriers + (layout.probability_barrier(0) // 8 + parity)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.probability_tx)
        head = worker.lane // 4
        maxima = worker.shared + layout.maxima + parity * layout.maxima_bytes + head * (SPLIT * 4)
        self.take(sums, 0, 8 * self.config.tiles, worker)
        running = [self.rescale_sums(sums, largest, tile, maxima) for tile in range(self.config.tiles)]
        # Where `send_probabilities` put the two 32-byte halves of a head.
        swap = head // 2 % 2 * VALUE_STEP
        line = worker.shared + layout.probabilities + parity * layout.probability_bytes + head * CHUNK
        line = line + worker.lane % 4 * 8
        at_once = self.ctas_at_once
        for first in cutlass.range_constexpr(0, SPLIT, at_once):
            ctas = range(first, first + at_once)
            self.values_of_ctas(sums, largest, early, values, ctas, self.kept(running), maxima, line, swap)
        self.keep(sums, 0, 8 * self.config.tiles, worker)

    def keep(self, registers: Any, first: int, count: int, worker: Worker) -> None:
        """Three tiles keep FP32 registers in shared memory between their uses: words `first` .. of a lane."""
        if self.config.probabilities_layout.kept_slots:
            for index in range(count):
                ptx.store_shared(self.kept_place(first + index, worker), [registers[index]])

    def take(self, registers: Any, first: int, count: int, worker: Worker) -> None:
        """What `keep` kept."""
        if self.config.probabilities_layout.kept_slots:
            for index in range(count):
                registers[index] = ptx.load_shared(self.kept_place(first + index, worker), 1)[0]

    def kept_place(self, word: int, worker: Worker) -> Any:
        """Address of a lane's word."""
        layout = self.config.probabilities_layout
        return worker.shared + layout.kept + worker.warp * (layout.kept_slots * 512) + word * 128 + worker.lane * 4

    def wait_for_probabilities(self, number: Any, early: Any, worker: Worker) -> None:
        """Until P of a round has come from all CTAs; `early`: operands that shall be ready by then."""
        layout = self.config.probabilities_layout
        ready = [word for cta in early for step in cta for column in step for pair in column for word in pair]
        barrier = worker.shared + layout.probability_barrier(0) + (number & 1) * 8
        ptx.wait_barrier(barrier, (number >> 1) & 1, ready, worker.shared + layout.scratch + worker.thread * 4)

    def early_values(self, place: Any) -> list[Any]:
        """Operands that are loaded and unpacked before the wait for P, where there are registers: of the first CTAs.

        Those of the other CTAs are unpacked while the products of the first ones wait for each other.
        """
        return [self.value_operands(place, cta) for cta in range(self.ctas_at_once if self.config.tiles == 1 else 0)]

    def value_operands(self, place: Any, cta: int) -> list[Any]:
        """f16 operands [2 steps][2 parities][2 mma] of one CTA's keys; `place`: a lane's address in those of CTA 0."""
        rows = [cta * CHUNK + step * VALUE_STEP for step in range(2)]
        pitch = self.config.probabilities_layout.value_pitch
        words = [ptx.load_matrices(place + row * pitch, 4, transposed=True) for row in rows]
        return [transposed_values(step_words) for step_words in words]

    def rescale_sums(self, sums: Any, largest: Any, tile: int, maxima: Any) -> list[list[Any]]:
        """Take a tile's sums to the largest maximum so far; returns the CTAs' maxima of heads g, g + 8.

        maxima: a lane's address of those of head g.
        """
        running = [ptx.load_shared(maxima + head_offset(tile, half) * (SPLIT * 4), SPLIT) for half in range(2)]
        for half in range(2):
            before = largest[tile * 2 + half]
            after = before
            for maximum in running[half]:
                after = ptx.maximum(after, maximum)
            factor = ptx.exp2(ptx.add(before, -after))
            largest[tile * 2 + half] = after
            for element in elements(tile, half):
                sums[element] = ptx.multiply(sums[element], factor)
        return running

    def kept(self, running: Any) -> Any:
        """What one tile keeps in registers and several load again."""
        return running if self.config.tiles == 1 else None

    @property
    def ctas_at_once(self) -> int:
        """CTAs whose products are interleaved where registers allow: one chain of mma waits for its own latency."""
        return 2 if self.config.tiles == 1 else 1

    def values_of_ctas(
        self,
        sums: Any,
        largest: Any,
        early: Any,
        place: Any,
        ctas: range,
        running: Any,
        maxima: Any,
        line: Any,
        swap: Any,
    ) -> None:
        """sums += w_c P_c . V_c of some CTAs, in order; `line`: a lane's address in P of CTA 0, head g."""
        values = {cta: early[cta] if cta < len(early) else self.value_operands(place, cta) for cta in ctas}
        for tile in range(self.config.tiles):
            current = {(cta, column): [Float32(0.0)] * 4 for cta in ctas for column in range(2)}
            for step, offset in enumerate((swap, VALUE_STEP - swap)):
                heads = line + tile * (HEAD_TILE * CHUNK) + offset
                sender = self.config.head_rows * CHUNK
                operands = {cta: probability_operands(heads + cta * sender, CHUNK) for cta in ctas}
                for half_step in range(2):
                    for cta, column in current:
                        value = values[cta][step][column][half_step]
                        current[cta, column] = ptx.mma_f16(operands[cta][half_step], value, current[cta, column])
            for cta in ctas:
                for half in range(2):
                    if running:
                        maximum = running[tile][half][cta]
                    else:
                        maximum = ptx.load_shared(maxima + head_offset(tile, half) * (SPLIT * 4) + cta * 4, 1)[0]
                    weight = ptx.exp2(ptx.add(maximum, -largest[tile * 2 + half]))
                    for element in elements(tile, half):
                        value = current[cta, element // 4 % 2][element % 4]
                        sums[element] = ptx.multiply_add(weight, value, sums[element])


def elements(tile: int, half: int) -> list[int]:
    """Indices of `sums` that belong to head g (half 0) or g + 8."""
    return [tile * 8 + column * 4 + half * 2 + offset for column in range(2) for offset in range(2)]


def head_offset(tile: int, half: int) -> int:
    """Lines from head g of a CTA's first tile to head g (half 0) or g + 8 of another."""
    return tile * HEAD_TILE + half * 8
