"""Config keys of the plugin."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Distributed(BaseModel):
    """Keys of the section `distributed`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ray_address: str = Field(
        "auto",
        description="The Ray cluster. auto: that of RAY_ADDRESS, or else the one of this machine; local: a new one, of "
        "this machine alone; `ray://host:port` or `host:port`.",
    )
    num_nodes: int = Field(1, ge=1, description="Nodes to train on, each with one process.")
    gpus_per_node: int = Field(
        0, ge=0, description="GPUs of each node; 0: all. In a cluster without GPUs the CPU of each node trains."
    )
    worker_output_dir: str | None = Field(
        None, description="Folder for the logs of nodes that do not write the outputs; null: `output_dir`."
    )
    placement_seconds: float = Field(
        60, ge=1, description="How long to wait for nodes to be free. Raise it if a cluster adds nodes on demand."
    )


class RayOptions(BaseModel):
    """All keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    distributed: Distributed = Field(default_factory=lambda: Distributed.model_validate({}))
