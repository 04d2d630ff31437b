"""The weight format `fp8`: E4M3 with a scale for each square of weights, as fine-grained FP8 checkpoints have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import CheckpointForm, Op, ParamInfo, Value, WeightFormatDef

from . import files
from .copies import e4m3_copies

if TYPE_CHECKING:
    from surogate_core.program.builder import Builder


class Fp8WeightOptions(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_fp8: bool = Field(False, description="Store the frozen weights of the blocks in FP8.")
    qlora_block_size: Literal[64, 128, 256] = Field(
        128, description="Rows and columns of the squares of weights that share an FP8 scale."
    )


def _attrs(info: ParamInfo, options: Fp8WeightOptions) -> dict[str, Any]:
    return {"rows": tuple(matrix.rows for matrix in info.matrices), "tile": options.qlora_block_size}


def _dequantized(info: ParamInfo, options: Fp8WeightOptions) -> dict[str, Any]:
    return {**_attrs(info, options), "dtype": info.param.dtype}


def quantize(b: Builder, info: ParamInfo, options: Fp8WeightOptions) -> Sequence[Value]:
    """Store codes and scales: 8.002 bits per weight with squares of 128. The last state is the amax."""
    attrs = _attrs(info, options)
    specs = b.ops["fp8_tile_quantize"].infer((info.param,), attrs)
    states = [b.state(f"{info.param.name}.{s.label}", s.shape, s.dtype, None, derived=True) for s in specs]
    stored = b.emit("fp8_tile_quantize", info.param, outs=states, **attrs)
    amax = b.state(f"{info.param.name}.amax", (len(info.matrices), 2), "fp32", None, derived=True)
    return *stored, *b.emit("fp8_tile_amax", *stored, outs=[amax], **_dequantized(info, options))


def dequantize(b: Builder, info: ParamInfo, stored: Sequence[Value], options: Fp8WeightOptions) -> Value:
    return b.apply("fp8_tile_dequantize", *stored[:-1], **_dequantized(info, options))


def copies(
    b: Builder, info: ParamInfo, stored: Sequence[Value], options: Fp8WeightOptions, op: Op, outputs: Sequence[int]
) -> Sequence[Value] | None:
    return e4m3_copies(b, info, stored, _dequantized(info, options), op, outputs)


FP8 = WeightFormatDef(
    name="fp8",
    summary="frozen weights in E4M3 with a scale for each square of weights",
    options=Fp8WeightOptions,
    key="qlora_fp8",
    quantize=quantize,
    dequantize=dequantize,
    checkpoints=CheckpointForm(
        matches=files.matches,
        check=files.check,
        kept=files.kept,
        parts=files.parts,
        load=files.load,
        save=files.save,
        config=files.config,
    ),
    copies=copies,
)
