"""The lock of a dataset in the token cache: one process tokenises it, others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

_SECONDS = 5.0
"""Between two calls of `moved`."""


@contextmanager
def cache_lock(path: Path, notice: Callable[[str], None], moved: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock while the block runs. Calls `notice` once if another process has it, and `moved` while it does."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        notice(f"waiting for another process that is tokenising the same data ({path})")
        while not lock.is_locked:
            moved(f"waiting for another process that is tokenising the same data ({path})")
            with suppress(filelock.Timeout):
                lock.acquire(timeout=_SECONDS)
    try:
        yield
    finally:
        lock.release()
