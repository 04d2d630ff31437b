"""A precision recipe for Surogate: the operands of products in blocks are rounded to the numbers of E4M3"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    Builder,
    DeviceInfo,
    LowerContext,
    NoOptions,
    Op,
    OpDef,
    OutSpec,
    Precision,
    PrecisionRequest,
    Program,
    Programs,
    RecipeDef,
    Support,
    Value,
    provides,
)
from surogate_core.api.products import quantized_precision

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"ops": 1, "recipes": 1}


def acme_toy_round(x: Tensor) -> Tensor:
    """The reference: x * 448 / max |x|, rounded to E4M3, and back."""
    import torch

    scale = 448 / x.float().abs().amax().clamp(min=1e-30)
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec(ins[0].label, ins[0].shape, ins[0].dtype)]


ROUND = OpDef(
    kind="acme_toy_round", infer=infer, reference=f"{__name__}:acme_toy_round", flops=lambda op: 3 * op.ins[0].size
)


def lower(programs: Programs, context: LowerContext[NoOptions]) -> Programs:
    """Change all programs of a run that multiply. A recipe that keeps states also appends to `derive` and `update`."""
    b = context.builder
    return replace(programs.with_micro_steps(lambda micro: rounded(micro, b)), evaluate=rounded(programs.evaluate, b))


def rounded(program: Program, b: Builder) -> Program:
    """Return the program with each operand of its products rounded once, where the first product reads it."""
    copies: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        product = b.ops[op.kind].product
        operands = op.ins[:2] if product and op.block >= 0 else ()
        with b.record(op.phase, op.block) as emitted:
            copies |= {operand: b.apply("acme_toy_round", operand) for operand in operands if operand not in copies}
            b.append(op.on({operand: copies[operand] for operand in operands}))
        ops += emitted
    return replace(program, ops=tuple(ops))


def precision(request: PrecisionRequest, options: NoOptions) -> Precision:
    """Return the dtypes of a run. The products themselves stay in bf16: this recipe only rounds what they read."""
    return quantized_precision(request, "acme_toy", "bf16", "bf16")


def supports(device: DeviceInfo, precision: Precision, options: NoOptions) -> Support:
    return Support(True)


RECIPE = RecipeDef(
    name="acme_toy",
    summary="products of operands rounded to E4M3",
    precision=precision,
    supports=supports,
    lower=lower,
    product_error=lambda precision, options: 0.04,
    kernels_of=("bf16",),
)

surogate_ops = provides([ROUND])
surogate_recipes = provides([RECIPE])
