"""Regular files: a name may be that of a named pipe, a device or a link, which others have made.

A pipe is never opened: that waits for whoever writes to it. What a program writes by a fixed name goes through no link.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..errors import ConfigError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_regular(path: Path) -> bool:
    """Return whether `path` is a regular file or a link to one. False for a name that no file can have."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # too long, a null byte, no such file, a loop of links
        return False


def refuse_special(path: Path) -> None:
    """Raise ConfigError for what exists and is no regular file. Call it before the file is opened to be read."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # whoever opens it says what is wrong
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: cannot be read: it is {_kind(mode)}, not a file. Name a file.")


def open_own(path: Path, flags: int) -> int:
    """Return the descriptor of the file `path`, created if there is none, that the program itself names.

    `flags`: those of `os.open`, such as `os.O_WRONLY | os.O_APPEND`. Raises OSError for a link, for a file with a
    second name, which may be anyone's, and for what is no regular file.
    """
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(error.errno, f"{path.name} is a link, through which nothing is written", str(path)) from None
        if error.errno == errno.ENXIO:  # a named pipe that nobody reads
            raise OSError(error.errno, f"{path.name} is a named pipe", str(path)) from None
        raise
    held = os.fstat(file)
    if stat.S_ISREG(held.st_mode) and held.st_nlink <= 1:
        return file
    os.close(file)
    what = "has a second name (a hard link)" if stat.S_ISREG(held.st_mode) else f"is {_kind(held.st_mode)}"
    raise OSError(errno.EINVAL, f"{path.name} {what}", str(path))


def _kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
