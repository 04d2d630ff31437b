"""The weight format `fp8`: E4M3 with a scale for each square of weights, as fine-grained FP8 checkpoints have it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import CheckpointForm, WeightFormatDef

from . import files
from .ops import STORAGE


class Fp8WeightOptions(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_fp8: bool = Field(False, description="Store the frozen weights of the blocks in FP8.")
    qlora_block_size: Literal[64, 128, 256] = Field(
        128, description="Rows and columns of the squares of weights that share an FP8 scale."
    )


FP8 = WeightFormatDef(
    name="fp8",
    summary="frozen weights in E4M3 with a scale for each square of weights",
    options=Fp8WeightOptions,
    key="qlora_fp8",
    quantize=STORAGE.quantize,
    dequantize=STORAGE.dequantize,
    checkpoints=CheckpointForm(
        matches=files.matches,
        check=files.check,
        parts=files.parts,
        load=files.load,
        save=files.save,
        config=files.config,
    ),
    copies=STORAGE.copies,
)
