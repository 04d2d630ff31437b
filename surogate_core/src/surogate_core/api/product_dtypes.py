"""Casts around the products of a program, so that their operands have the dtypes in which a recipe multiplies.

`cast_operands` is all that a recipe without quantization does for mixed precision. Recipes that quantize get it from
`lower_products`, for the products that stay in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ..program.op import Op, Program
from ..program.opdef import Product
from ..program.value import Value

if TYPE_CHECKING:
    from ..program.builder import Builder

_OTHERS: Mapping[str, Literal["forward", "backward"]] = {
    "lm_head_ce": "forward",
    "lm_head_ce_grads": "forward",
    "linear_bgrad": "backward",
}
"""Ops that are cast besides those with a product (`OpDef.product`), and which of the two dtypes their operands have."""


def cast_operands(program: Program, builder: Builder, *, forward: str, backward: str) -> Program:
    """Return `program` with the operands of every matrix product in its dtype, and results cast back where a product
    cannot write theirs. Forward and backward share one cast per value.

    forward   "bf16" or "fp32", of forward products
    backward  the same, of products with gradients
    """
    casts: dict[tuple[Value, str], Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        product, which = builder.ops[op.kind].product, _OTHERS.get(op.kind)
        if product is not None:
            which = "forward" if product.of == "forward" else "backward"
        dtype = {"forward": forward, "backward": backward, None: ""}[which]
        wanted = _input_dtypes(op, product, dtype) if which else ()
        if all(v.dtype == d for v, d in zip(op.ins, wanted, strict=False)):
            ops.append(op)
            continue
        with builder.record(op.phase, op.block) as emitted:
            ins = []
            for value, d in zip(op.ins, wanted, strict=True):
                if value.dtype != d and (value, d) not in casts:
                    casts[value, d] = builder.apply("cast", value, dtype=d)
                ins.append(casts[value, d] if value.dtype != d else value)
            _emit(op, ins, dtype, builder)
        ops += emitted
    return replace(program, ops=tuple(ops))


def _input_dtypes(op: Op, product: Product | None, dtype: str) -> tuple[str, ...]:
    """Return the dtype that each input must have. The scalar loss scale and integers are no operands.

    A matrix that a product adds to is none either: it has the dtype of the result.
    """
    dtypes = [dtype if v.dtype in ("bf16", "fp32") and v.shape else v.dtype for v in op.ins]
    if product is not None and product.adds == "base":
        dtypes[-1] = _result_dtype(op, dtype)
    return tuple(dtypes)


def _result_dtype(op: Op, dtype: str) -> str:
    """Products of bf16 operands are written in either dtype, those of fp32 operands in fp32."""
    return op.outs[0].dtype if dtype == "bf16" else dtype


def _emit(op: Op, ins: list[Value], dtype: str, builder: Builder) -> None:
    """Emit the product, and a cast for each result whose dtype it cannot write itself."""
    attrs = dict(op.attrs)
    if "dtype" in attrs or op.kind in ("linear", "linear_pair"):
        attrs["dtype"] = _result_dtype(op, dtype)
    specs = builder.ops[op.kind].infer(ins, attrs)
    results = [
        out if out.role != "act" or out.dtype == spec.dtype else builder.activation(out.label, spec.shape, spec.dtype)
        for out, spec in zip(op.outs, specs, strict=True)
    ]
    builder.emit(op.kind, *ins, outs=results, accumulate=op.accumulate, **attrs)
    for result, out in zip(results, op.outs, strict=True):
        if result is not out:
            builder.emit("cast", result, outs=[out], dtype=out.dtype)
