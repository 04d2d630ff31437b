"""`step_*` directories: complete or absent, whatever kills the run while one is written."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from ..errors import RunStopped

_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL = ".partial"  # step_00000050.partial: being written
_REPLACED = ".replaced"  # step_00000050.replaced: a whole older one, until the new one of that step has its name
_REMOVED = ".removed"  # step_00000050.removed: being deleted
_ASIDE = ".set_aside"  # step_00000050.set_aside: a whole one that the run went back behind
SAVING = ".saving-"
"""Prefix of the hidden directories in which files wait to be moved into their places."""

_STOPPING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})


def save_checkpoint(directory: Path, step: int, save: Callable[[Path], None]) -> Path:
    """Let `save` fill a fresh directory and make it `directory/step_XXXXXXXX`; returns that path.

    It gets its name only when all of it is on the disk, and takes the place of an older one of the same step. Raises
    RunStopped when the disk is full or refuses, after removing what was written; earlier checkpoints are untouched.
    """
    final = directory / f"step_{step:08d}"
    partial, replaced = (final.with_name(final.name + suffix) for suffix in (_PARTIAL, _REPLACED))
    with stopping_when_disk_refuses(final, safe_in=directory):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _remove(partial)
            partial.mkdir()
            save(partial)
            sync_tree(partial)
            if final.exists():
                _remove(replaced)
                final.rename(replaced)
            partial.rename(final)
            sync(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            if replaced.exists() and not final.exists():
                replaced.rename(final)
            raise
        _remove(replaced)
    return final


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory`, oldest step first; empty when it does not exist."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def prune_checkpoints(directory: Path, keep: int, newest: int | None = None) -> list[Path]:
    """Remove all but the `keep` checkpoints of the highest steps and return the removed; 0 keeps all.

    `newest` is the step that was just saved: higher ones are of an earlier run and neither count nor go, so that
    they cannot push it out. Each is renamed before it is deleted: what still has its name is whole.
    """
    own = [path for path in list_checkpoints(directory) if newest is None or int(path.name[len("step_") :]) <= newest]
    removed = own[:-keep] if keep > 0 else []
    for path in removed:
        doomed = path.with_name(path.name + _REMOVED)
        with stopping_when_disk_refuses(path, safe_in=directory, doing="removing"):
            _remove(doomed)
            path.rename(doomed)
            _remove(doomed)
    return removed


def remove_leftovers(directory: Path) -> list[Path]:
    """Clean up after a killed run, before the next begins; returns what was removed.

    What is half-written or half-deleted goes. A replaced one gets its name back if its successor never took it.
    """
    give_back_replaced(directory)
    removed = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        of_a_step = _STEP.fullmatch(path.stem) is not None and path.suffix in (_PARTIAL, _REPLACED, _REMOVED)
        if of_a_step or path.name.startswith(SAVING):
            _remove(path)
            removed.append(path)
    return removed


def give_back_replaced(directory: Path) -> None:
    """Give a checkpoint that was being replaced its name back, if its successor never took it."""
    for path in directory.glob(f"step_*{_REPLACED}"):
        if _STEP.fullmatch(path.stem) and not path.with_name(path.stem).exists():
            path.rename(path.with_name(path.stem))


def set_aside(directory: Path, after: int) -> list[Path]:
    """Rename the checkpoints of later steps than `after`, where a run goes back to, or begins (-1); returns their new
    paths.

    Nothing is deleted, but no later resume takes them for its newest.
    """
    return [aside(path) for path in list_checkpoints(directory) if int(path.name[len("step_") :]) > after]


def aside(path: Path) -> Path:
    """Rename a file or folder to a free name that says that it was set aside; returns it."""
    return path.rename(free_name(path))


def free_name(path: Path) -> Path:
    """The first name for what is set aside of `path` that nothing has."""
    names = (path.with_name(f"{path.name}{_ASIDE}{n or ''}") for n in count())
    return next(name for name in names if not name.exists())


# ------------------------------------------------------------------------------------------------------ durable writes


@contextmanager
def stopping_when_disk_refuses(target: Path, *, safe_in: Path, doing: str = "saving") -> Iterator[None]:
    """Turn a full, read-only or failing disk into RunStopped that says what could not be done and what is safe."""
    try:
        yield
    except OSError as error:
        if error.errno not in _STOPPING:
            raise
        complete = list_checkpoints(safe_in)
        safe = f"The newest complete checkpoint is {complete[-1]}." if complete else "No checkpoint was complete yet."
        free = "" if error.errno not in (errno.ENOSPC, errno.EDQUOT) else " Free some space or lower save_total_limit."
        raise RunStopped(f"{doing} {target} failed: {error.strerror}. {safe}{free}") from error


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """`sync` for every file and directory below `directory`, and for itself."""
    for path in sorted(directory.rglob("*"), reverse=True):
        sync(path)
    sync(directory)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
