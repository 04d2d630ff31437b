"""Core's own plugin: provides standard ops, collectives, formats, loggers and launcher through the usual hooks.

Imports are inside the hooks, so that listing plugins stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from .api import DatasetFormatDef, Finding, KernelDef, LauncherDef, LoggerDef, LossDef, OpDef, SystemInfo

hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    from .standard_ops import OPS

    return OPS


@hookimpl
def surogate_losses() -> Iterable[LossDef[Any]]:
    from .standard_ops.next_token import LOSSES

    return LOSSES


@hookimpl
def surogate_dataset_formats() -> Iterable[DatasetFormatDef[Any]]:
    from .data.chat.conversation import CONVERSATION
    from .data.chat.instruction import INSTRUCTION
    from .data.formats import TEXT

    return [TEXT, INSTRUCTION, CONVERSATION]


@hookimpl
def surogate_loggers() -> Iterable[LoggerDef[Any]]:
    from .reporting.builtin import LOGGERS

    return LOGGERS


@hookimpl
def surogate_launchers() -> Iterable[LauncherDef[Any]]:
    from .world.local import LAUNCHERS

    return LAUNCHERS


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    from .runtime import collectives, copies

    return (*collectives.KERNELS, *copies.KERNELS)


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    from .machine.system import diagnose

    return diagnose(system)
