"""wgmma with left operands from registers: m64nNk16, f16 x f16 + FP32, its shared operand and what surrounds it.

A warpgroup (4 warps) multiplies 64 rows; warp w of it has rows 16 w .. + 15 in registers as for mma.m16n8k16. The right
operand [N, K] lies in shared memory, K along a row, in blocks of 64 f16 (128 bytes a row) that are swizzled: the
16-byte piece c of row r is found at place c xor (r mod 8). Sums are FP32 [N / 8][4]: rows g, g, g + 8, g + 8 of the
warp's 16, columns 8 j + 2 q, + 1, the same two again (g = lane / 4, q = lane % 4).

A batch of products is one piece of PTX, from the fence to the wait: the registers that it reads and writes can't be
touched in between, so ptxas has nothing to serialise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from dcp_decode.kernels.inline_ptx import instruction

BLOCK = 64  # f16 numbers of a row of a swizzled block
BLOCK_ROW_BYTES = 2 * BLOCK
PIECE_BYTES = 16
PIECES = BLOCK_ROW_BYTES // PIECE_BYTES
STEP = 16  # numbers of K in one wgmma
UNIT_BYTES = 16  # in which a descriptor counts
STEP_UNITS = STEP * 2 // UNIT_BYTES
SWIZZLE_ROWS = 8
# 128-byte swizzle (1 in bits 62, 63), groups of 8 rows 1024 bytes apart, the unused leading offset 1.
_DESCRIPTOR = 1 << 62 | SWIZZLE_ROWS * BLOCK_ROW_BYTES // UNIT_BYTES << 32 | 1 << 16
# Of an address of the shared::cluster window: the bits that say where it is in its CTA.
_OWN_ADDRESS = 0x3FFFF


def swizzled(row: Any, piece: Any) -> Any:
    """Byte offset of a 16-byte piece of a row in a block; the block is 1024-byte aligned."""
    return row * BLOCK_ROW_BYTES + (piece ^ (row & SWIZZLE_ROWS - 1)) * PIECE_BYTES


def descriptor(address: Any) -> Any:
    """Of the right operand whose first block is at `address` in this CTA's shared memory."""
    units = Int64((address & Int32(_OWN_ADDRESS)) >> 4)
    return units | Int64(_DESCRIPTOR)


def multiply_add(
    sums: Sequence[Sequence[Any]], left: Sequence[Sequence[Sequence[Any]]], right: Any, offsets: Sequence[int]
) -> list[list[Any]]:
    """Of every tile of 64 rows: sums + the products of left[i] with the operand `right` + offsets[i] units.

    sums: of a tile N / 2 FP32 of a lane. left: of a tile 4 words of a lane for every offset. right: a descriptor.
    """
    tiles, count = len(sums), len(sums[0])
    total = tiles * count
    shape = f"m64n{2 * count}k16"
    lines = ["{", ".reg .b64 right;", "wgmma.fence.sync.aligned;"]
    for number, offset in enumerate(offsets):
        lines.append(f"add.s64 right, ${total + 4 * tiles * len(offsets)}, {offset};")
        for tile in range(tiles):
            registers = ",".join(f"${tile * count + place}" for place in range(count))
            words = ",".join(f"${total + 4 * (tile * len(offsets) + number) + word}" for word in range(4))
            lines.append(
                f"wgmma.mma_async.sync.aligned.{shape}.f32.f16.f16 {{{registers}}}, {{{words}}}, right, 1, 1, 1, 0;"
            )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    operands = [*(word for tile in left for words in tile for word in words), right]
    before = [value for tile in sums for value in tile]
    after = instruction("\n".join(lines), [Float32] * total, operands, updated=before)
    return [after[first : first + count] for first in range(0, total, count)]


def store_matrices(address: Any, words: Sequence[Any]) -> None:
    """stmatrix.x2/x4.trans: 8 x 8 matrices of 16-bit elements; lane (g, q) holds (g; 2 q, 2 q + 1) of one; transposed.

    One row address a lane, as for ldmatrix: row i of a matrix in memory holds its elements (0 .. 7; i).
    """
    registers = ",".join(f"${1 + place}" for place in range(len(words)))
    code = f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{registers}}};"
    instruction(code, [], [address, *words])


def raise_maximum(address: Any, value: Any) -> None:
    """red.shared.max.s32: the integer at a shared address becomes the larger one."""
    instruction("red.shared.max.s32 [$0], $1;", [], [address, value])


def rounded_pair(low: Any, high: Any) -> Any:
    """Two FP32 rounded to E4M3 (nearest even, saturating; NaN stays NaN), as f16x2."""
    code = "{\n.reg .b16 bytes;\ncvt.rn.satfinite.e4m3x2.f32 bytes, $2, $1;\ncvt.rn.f16x2.e4m3x2 $0, bytes;\n}"
    return instruction(code, [Uint32], [low, high], pure=True)


def exchange(word: Any, distance: int) -> Any:
    """shfl.sync.bfly.b32: the FP32 of the lane whose number differs in one bit."""
    return instruction(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", [Float32], [word])


def reduce_rows(values: Sequence[Any], lane: Any, combine: Callable[[Any, Any], Any]) -> tuple[list[Any], Any, Any]:
    """Combine every value over the eight lanes g = 0 .. 7 (lane / 4) of a warp, in a fixed order.

    A lane hands half of its values on at each step while their number is even, so the results lie spread over the
    lanes: returns (results, first, copies). Result i of a lane is that of value first + i; copies is 0 for one of the
    lanes that hold it.
    """
    held = list(values)
    first, copies = Int32(0), Int32(0)
    for distance in (16, 8, 4):
        half = len(held) // 2
        bit = lane & distance
        if len(held) % 2:
            held = [combine(value, exchange(value, distance)) for value in held]
            copies = copies | bit
            continue
        kept = [_select(bit, held[place], held[half + place]) for place in range(half)]
        sent = [_select(bit, held[half + place], held[place]) for place in range(half)]
        held = [combine(mine, exchange(other, distance)) for mine, other in zip(kept, sent, strict=True)]
        first = first + bit // distance * half
    return held, first, copies


def _select(bit: Any, if_zero: Any, otherwise: Any) -> Any:
    code = "{\n.reg .pred p;\nsetp.eq.s32 p, $1, 0;\nselp.f32 $0, $2, $3, p;\n}"
    return instruction(code, [Float32], [bit, if_zero, otherwise], pure=True)
