"""Hooks of `surogate-launch-ray`. Ray is imported when a run starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surogate_core.api import LauncherDef, Task, provides

from .options import RayOptions

SUROGATE_API = {"launchers": 1}


def _start(task: Task, notice: Callable[[str], None], options: RayOptions) -> Any:
    from .driver import start

    return start(task, options.distributed, notice)


surogate_launchers = provides(
    [
        LauncherDef(
            name="ray",
            summary="starts a process on each node of a Ray cluster",
            options=RayOptions,
            key="distributed",
            start=_start,
        )
    ]
)
