"""Hooks of `surogate-offload-residual`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import OffloadDef, provides

from .schedule import schedule

SUROGATE_API = {"offload_strategies": 1}


class ResidualOptions(BaseModel):
    """Config keys of the strategy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offload_residual: bool = Field(
        False, description="Keep the residual stream in host memory between the forward and the backward pass."
    )


surogate_offload_strategies = provides(
    [
        OffloadDef(
            name="residual",
            summary="keeps the residual stream in host memory between the forward and the backward pass",
            options=ResidualOptions,
            selected=lambda options: options.offload_residual,
            schedule=schedule,
            proposed=[{"offload_residual": True}],
        )
    ]
)
