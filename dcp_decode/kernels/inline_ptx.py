"""Inline PTX in a kernel: text and values in, values out. The instructions themselves are in `ptx` and `memory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int16, Int32, Int64, Uint16, Uint32, Uint64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

_IR: Any = ir  # its members are made at run time
_REGISTER: dict[Any, str] = {Float32: "f", Int32: "r", Uint32: "r", Int64: "l", Uint64: "l", Int16: "h", Uint16: "h"}


@dsl_user_op
def instruction(
    code: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    pure: bool = False,
    updated: Sequence[Any] = (),
    *,
    loc: Any = None,
    ip: Any = None,
) -> Any:
    """PTX text with $0.. = outputs then inputs; one output as a value, several as a list.

    updated: what the registers of the first outputs hold before, for an instruction that changes them in place.
    """
    operands = [Int32(value) if isinstance(value, int) else value for value in inputs]
    constraints = [f"={_REGISTER[kind]}" for kind in outputs] + [_REGISTER[type(value)] for value in operands]
    constraints += [str(place) for place in range(len(updated))]
    operands += updated
    kinds = [kind.mlir_type for kind in outputs]
    if not kinds:
        result_type = None
    elif len(kinds) == 1:
        result_type = kinds[0]
    else:
        result_type = _IR.Type.parse(f"!llvm.struct<({', '.join(map(str, kinds))})>")
    result = llvm.inline_asm(
        result_type,
        [value.ir_value(loc=loc, ip=ip) for value in operands],
        code,
        ",".join(constraints),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if not kinds:
        return None
    if len(kinds) == 1:
        return outputs[0](result)
    return [
        kind(llvm.extractvalue(kind.mlir_type, result, [index], loc=loc, ip=ip)) for index, kind in enumerate(outputs)
    ]
