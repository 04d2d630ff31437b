"""Ctrl-C while the program is imported. Imports nothing that takes time."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """End the process by a signal: nothing is begun, so nothing is to be cleaned up."""
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + number)


def expect() -> None:
    """Let Ctrl-C end the process without a traceback from now on, until `signals.handled`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, leave)
