"""Config keys of MXFP4 storage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Mxfp4WeightOptions(BaseModel):
    """Config keys of the format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    qlora_mxfp4: bool = Field(
        False, description="Store the frozen experts in MXFP4; in a model without experts, the weights of the blocks."
    )
