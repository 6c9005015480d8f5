"""PTX instructions on registers that CuTe DSL does not wrap as the kernels need them, one function each.

Those on memory are in `memory`, those around wgmma in `wgmma`.

An instruction is volatile unless it is a pure function of its operands: those that read a special register or what
other threads hold stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int16, Int32, Uint32

from dcp_decode.kernels.inline_ptx import instruction


def opaque(value: Any) -> Any:
    """mov.b32 that the compiler can't see through: what follows from it is computed here, not kept in registers."""
    return instruction("mov.b32 $0, $1;", [Int32], [value])


def grid_z() -> Any:
    """%ctaid.z, read here: the compiler keeps no register for it until then."""
    return instruction("mov.u32 $0, %ctaid.z;", [Int32], [])


def minimum_int32(left: Any, right: Any) -> Any:
    """min.s32."""
    return instruction("min.s32 $0, $1, $2;", [Int32], [left, right], pure=True)


def maximum_int32(left: Any, right: Any) -> Any:
    """max.s32."""
    return instruction("max.s32 $0, $1, $2;", [Int32], [left, right], pure=True)


def maximum_word(left: Any, right: Any) -> Any:
    """max.u32."""
    return instruction("max.u32 $0, $1, $2;", [Uint32], [left, right], pure=True)


def maximum(left: Any, right: Any) -> Any:
    """max.f32: the other operand where one is NaN."""
    return instruction("max.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def minimum(left: Any, right: Any) -> Any:
    """min.f32: the other operand where one is NaN."""
    return instruction("min.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def ordered(word: Any) -> Any:
    """The bits of an FP32 as a signed integer of the same order, and back: its own inverse."""
    flip = "{\n.reg .s32 s;\nshr.s32 s, $1, 31;\nand.b32 s, s, 0x7fffffff;\nxor.b32 $0, $1, s;\n}"
    return instruction(flip, [Int32], [word], pure=True)


def warp_maximum(value: Any) -> Any:
    """redux.sync.max.s32 on order-preserving integers: the largest FP32 of a warp (sm_90 has no FP32 redux).

    A NaN counts as larger than +inf or smaller than -inf, by its sign.
    """
    largest = instruction("redux.sync.max.s32 $0, $1, 0xffffffff;", [Int32], [ordered(float_bits(value))])
    return bits_float(ordered(largest))


def shuffle(word: Any, lane: Any) -> Any:
    """shfl.sync.idx.b32: the word that `lane` of this warp holds; all lanes take part."""
    return instruction("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", [Uint32], [word, lane])


def warp_any(value: Any) -> Any:
    """vote.sync.any: 1 for all lanes of this warp where one has a non-zero int32, else 0; all lanes take part."""
    code = "{\n.reg .pred p;\nsetp.ne.s32 p, $1, 0;\nvote.sync.any.pred p, p, 0xffffffff;\nselp.s32 $0, 1, 0, p;\n}"
    return instruction(code, [Int32], [value])


def barrier_any(value: Any, barrier: Any = None, threads: int = 0) -> Any:
    """barrier.red.or over the CTA, or the `threads` of a named barrier: non-zero for all where one has a non-zero."""
    chosen = "0" if barrier is None else f"$2, {threads}"
    code = (
        f"{{\n.reg .pred p;\nsetp.ne.s32 p, $1, 0;\nbarrier.cta.red.or.pred p, {chosen}, p;\nselp.s32 $0, 1, 0, p;\n}}"
    )
    return instruction(code, [Int32], [value] if barrier is None else [value, barrier])


def multiply(left: Any, right: Any) -> Any:
    """mul.rn.f32: never contracted into an fma, so that every variant rounds alike."""
    return instruction("mul.rn.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def add(left: Any, right: Any) -> Any:
    """add.rn.f32: never contracted into an fma."""
    return instruction("add.rn.f32 $0, $1, $2;", [Float32], [left, right], pure=True)


def multiply_add(left: Any, right: Any, addend: Any) -> Any:
    """fma.rn.f32: left * right + addend, one rounding."""
    return instruction("fma.rn.f32 $0, $1, $2, $3;", [Float32], [left, right, addend], pure=True)


def replace_if_nan(word: Any, probe: Any, replacement: int) -> Any:
    """selp.b32: `replacement` where the FP32 `probe` is NaN, else `word`."""
    code = f"{{\n.reg .pred p;\nsetp.nan.f32 p, $2, $2;\nselp.b32 $0, {replacement:#x}, $1, p;\n}}"
    return instruction(code, [Uint32], [word, probe], pure=True)


def select_less(left: Any, right: Any, below: Any, otherwise: Any) -> Any:
    """selp.f32: `below` where the int32 `left` < `right`, else `otherwise`."""
    code = "{\n.reg .pred p;\nsetp.lt.s32 p, $1, $2;\nselp.f32 $0, $3, $4, p;\n}"
    return instruction(code, [Float32], [left, right, below, otherwise], pure=True)


def select_less_int32(left: Any, right: Any, below: int, otherwise: int) -> Any:
    """selp.s32: `below` where the int32 `left` < `right`, else `otherwise`; both constants."""
    code = f"{{\n.reg .pred p;\nsetp.lt.s32 p, $1, $2;\nselp.s32 $0, {below}, {otherwise}, p;\n}}"
    return instruction(code, [Int32], [left, right], pure=True)


def exp2(value: Any) -> Any:
    """ex2.approx.ftz.f32."""
    return instruction("ex2.approx.ftz.f32 $0, $1;", [Float32], [value], pure=True)


def log2(value: Any) -> Any:
    """lg2.approx.f32."""
    return instruction("lg2.approx.f32 $0, $1;", [Float32], [value], pure=True)


def divide(numerator: Any, denominator: Any) -> Any:
    """div.full.f32: within 2 units in the last place, subnormals kept, no slow path."""
    return instruction("div.full.f32 $0, $1, $2;", [Float32], [numerator, denominator], pure=True)


def float_bits(value: Any) -> Any:
    """The bits of an FP32."""
    return instruction("mov.b32 $0, $1;", [Uint32], [value], pure=True)


def bits_float(word: Any) -> Any:
    """The FP32 of these bits."""
    return instruction("mov.b32 $0, $1;", [Float32], [word], pure=True)


def permute_bytes(low: Any, high: Any, selector: int) -> Any:
    """prmt.b32: four of the eight bytes (low = 0..3, high = 4..7), one selector nibble a byte."""
    return instruction(f"prmt.b32 $0, $1, $2, {selector:#x};", [Uint32], [low, high], pure=True)


def rotate_right(word: Any, bits: int) -> Any:
    """shf.r.wrap.b32 of a word with itself."""
    return instruction(f"shf.r.wrap.b32 $0, $1, $1, {bits};", [Uint32], [word], pure=True)


def e4m3_pair(low: Any, high: Any) -> Any:
    """cvt.rn.satfinite.e4m3x2.f32: two bytes, `low` in the low one; NaN becomes 0x7F."""
    return instruction("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", [Int16], [low, high], pure=True)


def e4m3_to_f16(word: Any) -> list[Any]:
    """Two cvt.rn.f16x2.e4m3x2: four E4M3 bytes as two f16x2 words (exact), low bytes first."""
    code = (
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 $0, low;\ncvt.rn.f16x2.e4m3x2 $1, high;\n}"
    )
    return instruction(code, [Uint32, Uint32], [word], pure=True)


def bf16_pair(low: Any, high: Any) -> Any:
    """cvt.rn.bf16x2.f32: two BF16, `low` in the low half."""
    return instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", [Uint32], [low, high], pure=True)


def bf16_pair_canonical(low: Any, high: Any) -> Any:
    """bf16_pair with 0x7FFF selected for each value that is NaN."""
    code = (
        "{\n.reg .pred p, q;\n.reg .b16 l, h;\n.reg .b32 w;\ncvt.rn.bf16x2.f32 w, $2, $1;\nmov.b32 {l, h}, w;\n"
        "setp.nan.f32 p, $1, $1;\nsetp.nan.f32 q, $2, $2;\n"
        "selp.b16 l, 0x7fff, l, p;\nselp.b16 h, 0x7fff, h, q;\nmov.b32 $0, {l, h};\n}"
    )
    return instruction(code, [Uint32], [low, high], pure=True)


def bf16_values(word: Any) -> list[Any]:
    """The two BF16 of a word as FP32, the low half first."""
    code = "{\n.reg .b32 t;\nshl.b32 t, $2, 16;\nmov.b32 $0, t;\nand.b32 t, $2, 0xffff0000;\nmov.b32 $1, t;\n}"
    return instruction(code, [Float32, Float32], [word], pure=True)


def e4m3_word(values: Sequence[Any]) -> Any:
    """Four FP32 as E4M3 bytes (nearest even, saturating), 0x7F selected for every NaN byte."""
    code = (
        "{\n.reg .b16 l, h;\n.reg .b32 w, t;\ncvt.rn.satfinite.e4m3x2.f32 l, $2, $1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;\nmov.b32 w, {l, h};\n"
        "and.b32 t, w, 0x7f7f7f7f;\nadd.u32 t, t, 0x01010101;\nand.b32 t, t, 0x80808080;\n"
        "not.b32 t, t;\nand.b32 $0, w, t;\n}"
    )
    return instruction(code, [Uint32], list(values), pure=True)


def mma_f16(left: Sequence[Any], right: Sequence[Any], accumulator: Sequence[Any]) -> list[Any]:
    """mma.m16n8k16 f16 x f16 + FP32: `left` 4 words (16 x 16), `right` 2 words (16 x 8), `accumulator` 4 FP32."""
    return instruction(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        [Float32] * 4,
        [*left, *right, *accumulator],
        pure=True,
    )
