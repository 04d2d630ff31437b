"""The built-in launcher: one worker, in this process. Threads per GPU and other machines join at this seam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..api import Comm, LauncherDef, Topology
from ..errors import ConfigError


@dataclass(frozen=True)
class Alone:
    """The only worker of a run."""

    rank: int = 0
    world_size: int = 1


def run_local(work: Callable[[Comm], Any], topology: Topology) -> Any:
    """Call `work` here. Raises ConfigError for more than one device: not built yet."""
    if topology.devices != 1:
        raise ConfigError(f"gpus: {topology.devices}: training on several GPUs is not built yet. Use gpus: 1.")
    return work(Alone())


LAUNCHERS = (LauncherDef(name="local", summary="One worker in this process", run=run_local),)
