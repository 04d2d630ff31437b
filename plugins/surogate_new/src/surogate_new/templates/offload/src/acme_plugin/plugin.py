"""An offload strategy for Surogate: the host holds the optimizer's states of the model's last blocks"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import ConfigError, OffloadContext, OffloadDef, Programs, Value, provides

SUROGATE_API = {"offload_strategies": 1}


class Options(BaseModel):
    """Keys of the YAML file. The prefix keeps them apart from those of other plugins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acme_toy_blocks: int = Field(0, ge=0, description="Number of blocks whose optimizer states the host holds.")


def on_host(programs: Programs, context: OffloadContext[Options]) -> Sequence[Value]:
    """Return what the host holds. Core copies the states of a block while other blocks are updated."""
    blocks = sorted({state.block for state in context.optimizer_states if state.block >= 0})
    chosen = set(blocks[-context.options.acme_toy_blocks :])
    if not chosen:
        raise ConfigError("acme_toy_blocks: the optimizer of this run has no states of blocks. Remove the key.")
    return [state for state in context.optimizer_states if state.block in chosen]


surogate_offload_strategies = provides(
    [
        OffloadDef(
            name="acme_toy",
            summary="optimizer states of the last blocks on the host",
            options=Options,
            selected=lambda options: options.acme_toy_blocks > 0,
            on_host=on_host,
            proposed=[{"acme_toy_blocks": 4}, {"acme_toy_blocks": 16}],
        )
    ]
)
