"""A launcher for Surogate: one process that trains on the device that a key or a variable names"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import ConfigError, JoinContext, LauncherDef, World, provides

SUROGATE_API = {"launchers": 1}
VARIABLE = "ACME_TOY_DEVICE"


class Options(BaseModel):
    """Keys of the YAML file. The prefix keeps them apart from those of other plugins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acme_toy_device: int = Field(0, ge=0, description=f"Index of the device, unless {VARIABLE} is set.")


def join(context: JoinContext, options: Options) -> World:
    """Return the processes of the run. This one is alone; several share a `Store`."""
    given = context.environment.get(VARIABLE, str(options.acme_toy_device))
    if not given.isdecimal() or int(given) >= context.device_count:
        raise ConfigError(
            f"{VARIABLE} or acme_toy_device is {given}; this machine has {context.device_count}, from 0 on."
        )
    return World(devices=(int(given),), started_by="acme_toy")


def matches(environment: Mapping[str, str]) -> str:
    """Return the variables by which `launcher: auto` selects this launcher; "" if they are not set."""
    return VARIABLE if VARIABLE in environment else ""


surogate_launchers = provides(
    [
        LauncherDef(
            name="acme_toy",
            summary="one process on a device of your choice",
            options=Options,
            join=join,
            matches=matches,
        )
    ]
)
