"""A weight format for Surogate: frozen matrices in E4M3, with a scale for each row"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import OpDef, OutSpec, StorageContext, Value, WeightFormatDef, provides

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"ops": 1, "weight_formats": 1}
LARGEST = 448.0  # of E4M3


class Options(BaseModel):
    """Keys of the YAML file. `acme_toy: true` selects the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acme_toy: bool = Field(False, description="Store the frozen matrices of blocks in E4M3, with a scale for each row.")


# ----------------------------------------------------------------------------------------------------------------- ops


def acme_toy_quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [R, C] -> codes [R, C] and scales [R], with which w is about codes * scales."""
    import torch

    scales = (w.float().abs().amax(dim=1) / LARGEST).clamp(min=1e-30)
    return (w.float() / scales[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def acme_toy_dequantize(codes: Tensor, scales: Tensor, *, dtype: str) -> Tensor:
    from surogate_core.reference.rounding import TORCH_DTYPES

    return (codes.float() * scales[:, None]).to(TORCH_DTYPES[dtype])


def infer_quantize(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    shape = ins[0].shape
    return [OutSpec("codes", shape, "e4m3"), OutSpec("scales", shape[:1], "fp32")]


def infer_dequantize(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec("weight", ins[0].shape, attrs["dtype"])]


QUANTIZE = OpDef(
    kind="acme_toy_quantize",
    infer=infer_quantize,
    reference=f"{__name__}:acme_toy_quantize",
    flops=lambda op: 3 * op.ins[0].size,
)
DEQUANTIZE = OpDef(
    kind="acme_toy_dequantize",
    infer=infer_dequantize,
    attrs={"dtype": str},
    reference=f"{__name__}:acme_toy_dequantize",
    flops=lambda op: op.ins[0].size,
    math=lambda op: "fp32",
)

# -------------------------------------------------------------------------------------------------------------- format


def quantize(context: StorageContext[Options]) -> Sequence[Value]:
    """Declare the states that hold a matrix, and emit the op that writes them when the matrix is loaded."""
    b, matrix = context.builder, context.param.param
    states = [
        b.state(f"{matrix.name}.acme_toy.{spec.label}", spec.shape, spec.dtype, None, derived=True)
        for spec in infer_quantize([matrix], {})
    ]
    return b.emit("acme_toy_quantize", matrix, outs=states)


def dequantize(stored: Sequence[Value], context: StorageContext[Options]) -> Value:
    """Emit the op that computes the matrix, where a pass first reads it."""
    dtype = context.param.param.dtype
    return context.builder.apply("acme_toy_dequantize", *stored, label="weight", dtype=dtype)


surogate_ops = provides([QUANTIZE, DEQUANTIZE])
surogate_weight_formats = provides(
    [
        WeightFormatDef(
            name="acme_toy",
            summary="E4M3 with a scale for each row",
            options=Options,
            key="acme_toy",
            quantize=quantize,
            dequantize=dequantize,
            bits=8.0,
        )
    ]
)
