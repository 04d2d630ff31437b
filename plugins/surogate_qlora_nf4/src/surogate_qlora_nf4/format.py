"""The weight format `nf4`: how QLoRA stores a frozen base (Dettmers et al. 2023), as bitsandbytes does."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import CheckpointForm, WeightFormatDef

from . import files
from .ops import STORAGE


class Nf4Options(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_bnb: bool = Field(False, description="Store the frozen weights of the blocks in NF4, as bitsandbytes does.")
    qlora_bnb_block_size: Literal[64, 128, 256, 512] = Field(64, description="Weights that share an NF4 scale.")
    qlora_bnb_double_quant: bool = Field(True, description="Store the NF4 scales in 8 bits.")


NF4 = WeightFormatDef(
    name="nf4",
    summary="frozen weights in 4-bit NormalFloat, with the bits of bitsandbytes",
    options=Nf4Options,
    key="qlora_bnb",
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
