"""Hooks of `surogate-launch-ray`. Ray is imported when a run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Here, LauncherDef, Task, World, provides
from surogate_core.errors import ConfigError

SUROGATE_API = 0


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
    """Config keys of the plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    distributed: Distributed = Field(default_factory=lambda: Distributed.model_validate({}))


def _join(here: Here, options: RayOptions) -> World:
    raise ConfigError("launcher: ray: starts its processes itself, and joins none that are started otherwise.")


def _start(task: Task, options: RayOptions, notice: Callable[[str], None]) -> Any:
    from .driver import start

    return start(task, options.distributed, notice)


surogate_launchers = provides(
    [
        LauncherDef(
            name="ray",
            summary="starts a process on each node of a Ray cluster",
            options=RayOptions,
            join=_join,
            key="distributed",
            start=_start,
        )
    ]
)
