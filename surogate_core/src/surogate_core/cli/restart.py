"""Restarts a run that has lost a device or a process from its last complete checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ..config.schema import TrainConfig
from ..errors import RunLost
from ..plugins.discovery import load_registry
from ..training import last_checkpoint
from .render import print_error


def restart_if_wanted(config: TrainConfig, error: RunLost, notice: Callable[[str], None]) -> None:
    """Replace this process by one that resumes the run. Return if that is not wanted, or there is no checkpoint.

    A new process, because the driver may refuse everything after the error of a device. Processes that another program
    has started are restarted by that.
    """
    launcher = load_registry(files=config.plugins).launcher(config.launcher)
    joined = launcher.start is None and launcher.matches(os.environ)
    checkpoint = "" if joined or not config.max_restarts else last_checkpoint(config)
    if not checkpoint:
        return
    print_error(str(error))
    left = config.max_restarts - 1
    notice(f"restarting from {checkpoint} (max_restarts: {left} left)")
    sys.stderr.flush()
    settings = ("--set", f"max_restarts={left}", "--set", "resume_from_checkpoint=true")
    os.execv(sys.executable, [sys.executable, "-m", "surogate_core.cli", *sys.argv[1:], *settings])
