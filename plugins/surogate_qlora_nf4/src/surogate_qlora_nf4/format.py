"""The weight format `nf4`: how QLoRA stores a frozen base (Dettmers et al. 2023), as bitsandbytes does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import CheckpointForm, Op, ParamInfo, Value, WeightFormatDef
from surogate_core.errors import ConfigError

from . import files
from .copies import e4m3_copies
from .tables import BLOCKS

if TYPE_CHECKING:
    from surogate_core.program.builder import Builder


class Nf4Options(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_bnb: bool = Field(False, description="Store the frozen weights of the blocks in NF4, as bitsandbytes does.")
    qlora_bnb_block_size: Literal[64, 128, 256, 512] = Field(64, description="Weights that share an NF4 scale.")
    qlora_bnb_double_quant: bool = Field(True, description="Store the NF4 scales in 8 bits.")


def _attrs(info: ParamInfo, options: Nf4Options) -> dict[str, Any]:
    return {"rows": tuple(matrix.rows for matrix in info.matrices), "block": options.qlora_bnb_block_size}


def _dequantized(info: ParamInfo, options: Nf4Options) -> dict[str, Any]:
    return {**_attrs(info, options), "shape": info.param.shape, "dtype": info.param.dtype}


def quantize(b: Builder, info: ParamInfo, options: Nf4Options) -> Sequence[Value]:
    """Store codes and scales: 4.5 bits per weight, or 4.13 with double quantization. The last state is the amax."""
    param, block = info.param, options.qlora_bnb_block_size
    if param.shape[1] % block:
        instead = "No block size divides it. Use qlora_fp8: true, which takes any shape."
        if any(param.shape[1] % other == 0 for other in BLOCKS):
            instead = "Use a block size that divides it, or another format."
        raise ConfigError(
            f"qlora_bnb: {param.name} has {param.shape[1]} columns, which is no multiple of qlora_bnb_block_size: "
            f"{block}. {instead}"
        )
    attrs = {**_attrs(info, options), "double": options.qlora_bnb_double_quant}
    specs = b.ops["nf4_quantize"].infer((param,), attrs)
    states = [b.state(f"{param.name}.{s.label}", s.shape, s.dtype, None, derived=True) for s in specs]
    stored = b.emit("nf4_quantize", param, outs=states, **attrs)
    amax = b.state(f"{param.name}.amax", (len(info.matrices), 2), "fp32", None, derived=True)
    return *stored, *b.emit("nf4_amax", *stored, outs=[amax], **_dequantized(info, options))


def dequantize(b: Builder, info: ParamInfo, stored: Sequence[Value], options: Nf4Options) -> Value:
    return b.apply("nf4_dequantize", *stored[:-1], **_dequantized(info, options))


def copies(
    b: Builder, info: ParamInfo, stored: Sequence[Value], options: Nf4Options, op: Op, outputs: Sequence[int]
) -> Sequence[Value] | None:
    return e4m3_copies(b, info, stored, _dequantized(info, options), op, outputs)


NF4 = WeightFormatDef(
    name="nf4",
    summary="frozen weights in 4-bit NormalFloat, with the bits of bitsandbytes",
    options=Nf4Options,
    key="qlora_bnb",
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
