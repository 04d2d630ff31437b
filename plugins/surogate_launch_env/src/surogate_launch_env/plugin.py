"""Hooks of `surogate-launch-env`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import JoinContext, LauncherDef, World, provides

from .place import recognised

SUROGATE_API = {"launchers": 1}


class EnvOptions(BaseModel):
    """Config keys of the plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    join_seconds: float = Field(
        600, ge=1, description="How long a process waits at the start for all others, in seconds."
    )


def _join(context: JoinContext, options: EnvOptions) -> World:
    from .join import join

    return join(context, options.join_seconds)


surogate_launchers = provides(
    [
        LauncherDef(
            name="env",
            summary="joins processes that torchrun, mpirun or srun has started, by their environment variables",
            options=EnvOptions,
            join=_join,
            matches=recognised,
        )
    ]
)
