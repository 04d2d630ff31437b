"""The weight format `fp4`: NVFP4 as storage, which any GPU can read. Products are in the dtype of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import CheckpointForm, Op, ParamInfo, Value, WeightFormatDef
from surogate_core.errors import ConfigError

from . import files
from .copies import e4m3_copies
from .ops import BLOCK

if TYPE_CHECKING:
    from surogate_core.program.builder import Builder


class Fp4WeightOptions(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_fp4: bool = Field(False, description="Store the frozen weights of the blocks in NVFP4.")
    qlora_four_over_six: bool = Field(
        True, description="Choose for each block of NVFP4 weights whether its largest code is 4 or 6, by its error."
    )


def _attrs(info: ParamInfo) -> dict[str, Any]:
    return {"rows": tuple(matrix.rows for matrix in info.matrices)}


def _dequantized(info: ParamInfo) -> dict[str, Any]:
    return {**_attrs(info), "dtype": info.param.dtype}


def quantize(b: Builder, info: ParamInfo, options: Fp4WeightOptions) -> Sequence[Value]:
    """Store codes and scales: 4.5 bits per weight. The last state is the amax."""
    param = info.param
    if param.shape[1] % BLOCK:
        raise ConfigError(
            f"qlora_fp4: {param.name} has {param.shape[1]} columns, which is no multiple of {BLOCK}, the block of "
            "NVFP4. Use another format."
        )
    attrs = {**_attrs(info), "four_over_six": options.qlora_four_over_six}
    specs = b.ops["fp4_block_quantize"].infer((param,), attrs)
    states = [b.state(f"{param.name}.{s.label}", s.shape, s.dtype, None, derived=True) for s in specs]
    stored = b.emit("fp4_block_quantize", param, outs=states, **attrs)
    amax = b.state(f"{param.name}.amax", (len(info.matrices), 2), "fp32", None, derived=True)
    return *stored, *b.emit("fp4_block_amax", *stored, outs=[amax], **_dequantized(info))


def dequantize(b: Builder, info: ParamInfo, stored: Sequence[Value], options: Fp4WeightOptions) -> Value:
    return b.apply("fp4_block_dequantize", *stored[:-1], **_dequantized(info))


def copies(
    b: Builder, info: ParamInfo, stored: Sequence[Value], options: Fp4WeightOptions, op: Op, outputs: Sequence[int]
) -> Sequence[Value] | None:
    return e4m3_copies(b, info, stored, _dequantized(info), op, outputs)


FP4 = WeightFormatDef(
    name="fp4",
    summary="frozen weights in NVFP4: 4 bits and an FP8 scale for each 16 of a row",
    options=Fp4WeightOptions,
    key="qlora_fp4",
    quantize=quantize,
    dequantize=dequantize,
    checkpoints=CheckpointForm(
        matches=files.matches,
        check=files.check,
        kept=files.kept,
        parts=files.parts,
        ignored=files.IGNORED,
        load=files.load,
        save=files.save,
        config=files.config,
        loaded_by=("vLLM",),
    ),
    copies=copies,
)
