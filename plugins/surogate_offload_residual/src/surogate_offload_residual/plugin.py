"""Hooks of `surogate-offload-residual`."""

from __future__ import annotations

from functools import partial

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import OffloadDef, provides

from .schedule import ATTENTION, ATTENTION_LABELS, RESIDUAL, schedule

SUROGATE_API = {"offload_strategies": 1}


class ResidualOptions(BaseModel):
    """Config keys of the strategy `residual`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offload_residual: bool = Field(
        False, description="Keep the residual stream in host memory between the forward and the backward pass."
    )


class AttentionOptions(BaseModel):
    """Config keys of the strategy `attention`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    offload_attention: bool = Field(
        False,
        description="Keep the outputs of attention in host memory between the forward and the backward pass. Attention "
        "is then not computed again where blocks are recomputed.",
    )


surogate_offload_strategies = provides(
    [
        OffloadDef(
            name="attention",
            summary="keeps the outputs of attention in host memory between the forward and the backward pass",
            options=AttentionOptions,
            selected=lambda options: options.offload_attention,
            keeps=ATTENTION_LABELS,
            schedule=partial(schedule, moved=ATTENTION),
            proposed=[{"offload_attention": True}],
        ),
        OffloadDef(
            name="residual",
            summary="keeps the residual stream in host memory between the forward and the backward pass",
            options=ResidualOptions,
            selected=lambda options: options.offload_residual,
            schedule=partial(schedule, moved=RESIDUAL),
            proposed=[{"offload_residual": True}],
        ),
    ]
)
