"""The weight format `fp4`: NVFP4 as storage, which any GPU can read. Products are in the dtype of the recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import CheckpointForm, WeightFormatDef

from . import files
from .ops import STORAGE


class Fp4WeightOptions(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_fp4: bool = Field(False, description="Store the frozen weights of the blocks in NVFP4.")
    qlora_four_over_six: bool = Field(
        True, description="Choose for each block of NVFP4 weights whether its largest code is 4 or 6, by its error."
    )


FP4 = WeightFormatDef(
    name="fp4",
    summary="frozen weights in NVFP4: 4 bits and an FP8 scale for each 16 of a row",
    options=Fp4WeightOptions,
    key="qlora_fp4",
    quantize=STORAGE.quantize,
    dequantize=STORAGE.dequantize,
    checkpoints=CheckpointForm(
        matches=files.matches,
        check=files.check,
        parts=files.parts,
        ignored=files.IGNORED,
        load=files.load,
        save=files.save,
        config=files.config,
    ),
    copies=STORAGE.copies,
)
