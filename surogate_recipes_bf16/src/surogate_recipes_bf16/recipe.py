"""The `bf16` recipe: matrix products of bf16 or fp32 operands with fp32 accumulation, without quantization.

If `matmul_dtype` differs from `model_dtype`, the recipe casts the operands of matrix products and, if necessary, their
results. That is all that it does for mixed precision.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel

from surogate_core.api import (
    DeviceInfo,
    LowerContext,
    Precision,
    PrecisionRequest,
    Programs,
    RecipeDef,
    Support,
)
from surogate_core.api.product_dtypes import cast_operands

LEGAL_PAIRS = (("fp32", "fp32"), ("bf16", "bf16"))
"""Pairs (matmul_dtype, gradient_dtype) that the recipe serves itself."""


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
    dtypes = {"forward": context.precision.matmul, "backward": context.precision.gradient}
    return replace(
        programs,
        micro=cast_operands(programs.micro, context.builder, **dtypes),
        evaluate=cast_operands(programs.evaluate, context.builder, **dtypes),
    )


BF16 = RecipeDef(
    name="bf16",
    summary="Products of bf16 (or fp32) operands with fp32 accumulation",
    precision=precision,
    supports=supports,
    lower=lower,
    products=LEGAL_PAIRS,
)
