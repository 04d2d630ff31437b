"""The `bf16` recipe: matrix products of bf16 or fp32 operands with fp32 accumulation, without quantization.

If `matmul_dtype` differs from `model_dtype`, the recipe casts the operands of matrix products and, if necessary, their
results. That is all that it does for mixed precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel

from surogate_core.api import (
    Builder,
    DeviceInfo,
    LowerContext,
    Op,
    Precision,
    PrecisionRequest,
    Product,
    Program,
    Programs,
    RecipeDef,
    Support,
    Value,
)

LEGAL_PAIRS = (("fp32", "fp32"), ("bf16", "bf16"))
"""Pairs (matmul_dtype, gradient_dtype) that the recipe serves itself."""

_OTHERS: Mapping[str, Literal["matmul", "gradient"]] = {
    "lm_head_ce": "matmul",
    "lm_head_ce_grads": "matmul",
    "linear_bgrad": "gradient",
}
"""Ops that are cast besides those with a product (`OpDef.product`), and which of the two dtypes their operands have."""


def precision(request: PrecisionRequest, options: BaseModel) -> Precision:
    """Fill in the default dtypes.

    Products and masters default to `model_dtype` (default bf16); gradients of params, optimizer states and LoRA default
    to fp32.
    """
    model = request.model_dtype or "bf16"
    matmul = request.matmul_dtype or model
    return Precision(
        model=model,
        matmul=matmul,
        gradient=request.gradient_dtype or matmul,
        master=request.master_dtype or model,
        adapter=request.adapter_dtype or "fp32",
        param_grad=request.param_grad_dtype or "fp32",
        optimizer_state=request.optimizer_state_dtype or "fp32",
    )


def supports(device: DeviceInfo, precision: Precision, options: BaseModel) -> Support:
    """A GPU must have bf16 tensor cores. A CPU is always supported, because it runs the references."""
    if device.sm is not None and device.sm < 80:
        return Support(False, f"bf16 needs SM80 or newer, {device.title} is SM{device.sm}")
    return Support(True)


def lower(programs: Programs, context: LowerContext) -> Programs:
    """Cast the operands of every matrix product to its dtype."""
    builder, precision = context.builder, context.precision
    return replace(
        programs,
        micro=cast_operands(programs.micro, builder, precision),
        evaluate=cast_operands(programs.evaluate, builder, precision),
    )


def cast_operands(program: Program, builder: Builder, precision: Precision) -> Program:
    """Cast the operands of every matrix product to its dtype. Forward and backward share one cast per value."""
    casts: dict[tuple[Value, str], Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        product, which = builder.ops[op.kind].product, _OTHERS.get(op.kind)
        if product is not None:
            which = "matmul" if product.of == "forward" else "gradient"
        dtype = getattr(precision, which) if which else ""
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


BF16 = RecipeDef(
    name="bf16",
    summary="Products of bf16 (or fp32) operands with fp32 accumulation",
    precision=precision,
    supports=supports,
    lower=lower,
    products=LEGAL_PAIRS,
)
