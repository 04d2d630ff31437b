"""A lock on each folder that a command writes to, so that no two commands write to one at the same time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from reprlib import repr as brief

from surogate_core.api.regular_file import open_own
from surogate_core.errors import ConfigError

from .folders import made

LOCK = ".surogate.lock"
"""Name of the lock file. It is removed with the lock, and left by a process that is killed."""

LONGEST_NAME = 64
"""Characters of a host's name."""

_TAKEN = frozenset({errno.EAGAIN, errno.EACCES})
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_WORDS_SECONDS = 1.0
"""Seconds to wait for the line that the holder of a lock writes right after it has taken it."""


@contextmanager
def locked(folders: Mapping[Path, str], notice: Callable[[str], None]) -> Iterator[None]:
    """Hold the locks of folders, which are created. In a run of several processes the writing one calls this.

    folders: {folder: how errors about it begin, such as "output_dir: "}.

    The kernel releases a lock when its process ends, also by `kill -9`. On a shared file system the server does, so the
    lock holds between machines too. `notice` is called if the file system has no locks, or if the last holder was on
    another machine and has not removed its lock file: then the file system may not show the locks of other machines.

    Raises ConfigError, naming the holder, if another process holds one of the locks, or a folder cannot be written to.
    New folders are removed if the block fails and leaves nothing in them.
    """
    with ExitStack() as stack:
        named = {folder.resolve(): (folder, name) for folder, name in folders.items()}
        for _, (folder, name) in sorted(named.items()):  # one order for all commands
            stack.enter_context(_locked(folder, name, notice))
        yield


@contextmanager
def _locked(folder: Path, name: str, notice: Callable[[str], None]) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(made(folder))
            file = _take(folder, name, notice)
        except OSError as error:
            raise ConfigError(f"{name}{folder}: cannot be written to: {error.strerror}. Name another folder.") from None
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()  # while it is locked, so that no other process holds this file
            os.close(file)


def _take(folder: Path, name: str, notice: Callable[[str], None]) -> int:
    """Return the descriptor of the locked lock file."""
    path = folder / LOCK
    while True:
        with suppress(FileNotFoundError):  # another process has removed the folder that it made, or its lock file
            folder.mkdir(parents=True, exist_ok=True)
            file = open_own(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_ino == path.stat().st_ino:
                    break
            except OSError as error:
                if error.errno in _TAKEN:
                    holder = _holder(file)
                    os.close(file)
                    raise ConfigError(
                        f"{name}{folder} is in use by {holder}. Wait until it ends, or name another folder."
                    ) from None
                if error.errno in _UNSUPPORTED:
                    notice(
                        f"{folder}: the file system has no locks ({error.strerror}): a second run in this folder would "
                        "not be refused"
                    )
                    break
                os.close(file)
                raise
            os.close(file)
    with suppress(OSError):  # a full disk: the holder stays unknown
        _sign(file, folder, notice)
    return file


def _sign(file: int, folder: Path, notice: Callable[[str], None]) -> None:
    """Write this process into a lock file."""
    last, host = _read(file), socket.gethostname()
    if last is not None and last["host"] != host:
        notice(
            f"{folder}: {_text(last)} has not removed its lock. It was killed, or this file system does not show the "
            "locks of other machines: then make sure that it has ended"
        )
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "host": host, "time": time.time()}).encode(), 0)
    os.fsync(file)


def _holder(file: int) -> str:
    deadline = time.monotonic() + _WORDS_SECONDS
    while (found := _read(file)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return "another process" if found is None else _text(found)


def _read(file: int) -> dict[str, object] | None:
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and {"pid", "host", "time"} <= found.keys() else None


def _text(holder: dict[str, object]) -> str:
    named = f"process {brief(holder['pid'])} (host {str(holder['host'])[:LONGEST_NAME]}"
    try:
        began = time.localtime(float(str(holder["time"])))
    except (ValueError, OverflowError, OSError):  # another program wrote it
        return f"{named})"
    since = time.strftime("%H:%M" if began[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", began)
    return f"{named}, since {since})"
