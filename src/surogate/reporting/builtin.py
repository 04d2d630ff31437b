"""The loggers of every run: metrics file, console and picture. Their imports are done when they are opened."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

from surogate_core.api import Logger, LoggerDef, RunInfo

from .metrics import JsonLinesLogger


def open_console(info: RunInfo) -> Logger:
    """Return the live display in a notebook, or if stdout is a terminal that can move its cursor; else plain lines."""
    notebook = "ipykernel" in sys.modules and find_spec("ipywidgets") is not None  # with which rich draws
    if notebook or (sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")):
        from .live import LiveLogger

        return LiveLogger(info, sys.stdout)
    from .console import PlainLogger

    return PlainLogger(info, sys.stdout)


def _open_picture(info: RunInfo, options: Any) -> Logger:
    from .picture import PictureLogger

    return PictureLogger(info)


LOGGERS: tuple[LoggerDef, ...] = (
    LoggerDef(
        name="jsonl",
        summary="every report as a line in output_dir/metrics.jsonl",
        open=lambda info, options: JsonLinesLogger(info),
        always=True,
    ),
    LoggerDef(
        name="console",
        summary="live progress; plain lines if stdout is not a terminal",
        open=lambda info, options: open_console(info),
        always=True,
    ),
    LoggerDef(name="picture", summary="the loss curve as output_dir/loss.png", open=_open_picture, always=True),
)
