"""Config keys of NVFP4 storage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Fp4WeightOptions(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_fp4: bool = Field(False, description="Store the frozen weights of the blocks in NVFP4.")
    qlora_four_over_six: bool = Field(
        True, description="Choose for each block of NVFP4 weights whether its largest code is 4 or 6, by its error."
    )
