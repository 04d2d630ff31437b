"""The program's own plugin: provides dataset formats, loggers and the launcher of one machine through the usual hooks,
and the words that errors of core use.

Imports are inside the hooks, so that listing plugins stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from surogate_core.api import DatasetFormatDef, ExportFormatDef, Finding, LauncherDef, LoggerDef, SystemInfo
from surogate_core.front_end import use

from .front_end import FRONT_END

SUROGATE_API = {"dataset_formats": 1, "export_formats": 1, "loggers": 1, "launchers": 1, "diagnose": 1}

hookimpl = pluggy.HookimplMarker("surogate")

use(FRONT_END)


@hookimpl
def surogate_dataset_formats() -> Iterable[DatasetFormatDef[Any]]:
    from .data.chat.conversation import CONVERSATION
    from .data.chat.instruction import INSTRUCTION
    from .data.formats import TEXT

    return [TEXT, INSTRUCTION, CONVERSATION]


@hookimpl
def surogate_export_formats() -> Iterable[ExportFormatDef]:
    return [
        ExportFormatDef(
            name="hf",
            summary="a model in floating point, as transformers loads it",
            write=lambda context, folder: context.write_model(folder, (), {}),
        )
    ]


@hookimpl
def surogate_loggers() -> Iterable[LoggerDef[Any]]:
    from .reporting.builtin import LOGGERS

    return LOGGERS


@hookimpl
def surogate_launchers() -> Iterable[LauncherDef[Any]]:
    from .world.local import LAUNCHERS

    return LAUNCHERS


@hookimpl
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:
    from .machine.system import diagnose

    return diagnose(system)
