"""Hooks of `surogate-offload-states`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import OffloadDef, provides

from .selection import embedding, gradients, masters, optimizer_states, quantized_weights, weights

SUROGATE_API = {"offload_strategies": 1}


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerOptions(_Options):
    """Config keys of the strategy `optimizer`."""

    offload_optimizer: bool = Field(False, description="Keep the states of the optimizer in host memory.")


class MasterOptions(_Options):
    """Config keys of the strategy `master`."""

    offload_master: bool = Field(False, description="Keep the master weights in host memory.")


class GradientOptions(_Options):
    """Config keys of the strategy `grads`."""

    offload_grads: bool = Field(False, description="Keep the gradients of blocks in host memory.")


class WeightOptions(_Options):
    """Config keys of the strategy `weights`."""

    offload_weights: bool | int = Field(
        False, ge=0, description="Keep the weights of all blocks (true), or of this many blocks, in host memory."
    )


class QuantOptions(_Options):
    """Config keys of the strategy `quants`."""

    offload_quants: bool | int = Field(
        False, ge=0, description="Keep the quantized weights of all blocks (true), or of this many, in host memory."
    )


class EmbeddingOptions(_Options):
    """Config keys of the strategy `embedding`."""

    offload_embedding: bool = Field(
        False, description="Keep a frozen embedding in host memory, of which the device reads the rows of its tokens."
    )


surogate_offload_strategies = provides(
    [
        OffloadDef(
            name="optimizer",
            summary="keeps the states of the optimizer in host memory",
            options=OptimizerOptions,
            selected=lambda options: options.offload_optimizer,
            proposed=[{"offload_optimizer": True}],
            on_host=optimizer_states,
        ),
        OffloadDef(
            name="master",
            summary="keeps the master weights in host memory",
            options=MasterOptions,
            selected=lambda options: options.offload_master,
            proposed=[{"offload_master": True}],
            on_host=masters,
        ),
        OffloadDef(
            name="grads",
            summary="keeps the gradients of blocks in host memory",
            options=GradientOptions,
            selected=lambda options: options.offload_grads,
            proposed=[{"offload_grads": True}],
            on_host=gradients,
        ),
        OffloadDef(
            name="weights",
            summary="keeps the weights of blocks in host memory",
            options=WeightOptions,
            selected=lambda options: bool(options.offload_weights),
            proposed=[
                {"offload_weights": 4},
                {"offload_weights": 9},
                {"offload_weights": 18},
                {"offload_weights": True},
            ],
            on_host=weights,
        ),
        OffloadDef(
            name="quants",
            summary="keeps the quantized weights of blocks in host memory",
            options=QuantOptions,
            selected=lambda options: bool(options.offload_quants),
            proposed=[{"offload_quants": 4}, {"offload_quants": 9}, {"offload_quants": 18}, {"offload_quants": True}],
            on_host=quantized_weights,
        ),
        OffloadDef(
            name="embedding",
            summary="keeps a frozen embedding in host memory",
            options=EmbeddingOptions,
            selected=lambda options: options.offload_embedding,
            on_host=embedding,
        ),
    ]
)
