"""Config keys of blockwise FP8 storage."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Fp8WeightOptions(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_fp8: bool = Field(False, description="Store the frozen weights of the blocks in FP8.")
    qlora_block_size: Literal[64, 128, 256] = Field(
        128, description="Rows and columns of the squares of weights that share an FP8 scale."
    )
