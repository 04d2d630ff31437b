"""Config keys of NF4 storage."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Nf4Options(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_bnb: bool = Field(False, description="Store the frozen weights of the blocks in NF4, as bitsandbytes does.")
    qlora_bnb_block_size: Literal[64, 128, 256, 512] = Field(64, description="Weights that share an NF4 scale.")
    qlora_bnb_double_quant: bool = Field(True, description="Store the NF4 scales in 8 bits.")
