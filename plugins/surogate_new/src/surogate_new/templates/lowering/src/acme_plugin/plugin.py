"""A lowering for Surogate: `matmul_dtype: e4m3` with `gradient_dtype: bf16` for recipes that do not serve the pair"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    Builder,
    DeviceInfo,
    LowerContext,
    LoweringDef,
    Op,
    OpDef,
    OutSpec,
    Precision,
    Program,
    Programs,
    Support,
    Value,
    provides,
)

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"ops": 1, "lowerings": 1}


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


def lower(programs: Programs, context: LowerContext[Any]) -> Programs:
    """Round the operands of forward products in blocks. The products, and all backward ones, stay in bf16."""
    b = context.builder
    return replace(programs.with_micro_steps(lambda micro: rounded(micro, b)), evaluate=rounded(programs.evaluate, b))


def rounded(program: Program, b: Builder) -> Program:
    copies: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in program.ops:
        product = b.ops[op.kind].product
        operands = op.ins[:2] if product and product.of == "forward" and op.block >= 0 else ()
        with b.record(op.phase, op.block) as emitted:
            copies |= {operand: b.apply("acme_toy_round", operand) for operand in operands if operand not in copies}
            b.append(op.on({operand: copies[operand] for operand in operands}))
        ops += emitted
    return replace(program, ops=tuple(ops))


def supports(device: DeviceInfo, precision: Precision) -> Support:
    return Support(precision.model == "bf16", "needs model_dtype: bf16")


surogate_ops = provides([ROUND])
surogate_lowerings = provides(
    [
        LoweringDef(
            matmul="e4m3",
            gradient="bf16",
            summary="forward products of operands rounded to E4M3",
            supports=supports,
            lower=lower,
            product_error=lambda precision: 0.04,
        )
    ]
)
