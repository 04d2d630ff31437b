"""`step_*` directories: complete or absent, whatever kills the run while one is written.

To set a file or folder aside is to rename it to a free name that ends in `.set_aside`. It is never deleted, and no run
reads it again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from surogate_core.api.destination import PARTIAL, REMOVED, REPLACED, STEP
from surogate_core.api.json_object import read_json_object
from surogate_core.errors import ConfigError, RunStopped

_ASIDE = ".set_aside"  # step_00000050.set_aside: a complete one of a later step than the run resumed from
SAVING = ".saving-"
"""Prefix of hidden directories that hold complete files until they are moved to their final names."""

DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REPLACED_FOLDER = frozenset({errno.EEXIST, errno.ENOTDIR})  # another program put a file in place of a folder
_STOPPING = (
    DISK_IS_FULL | _REPLACED_FOLDER | frozenset({errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})
)


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def save_checkpoint(directory: Path, step: int, save: Callable[[Path], None]) -> Path:
    """Have `save` fill a new directory and rename it to `directory/step_XXXXXXXX`. Return that path.

    It is renamed only when all of it is on the disk, and replaces an older checkpoint of the same step. Raises
    RunStopped when the disk is full or refuses, after removing what was written; earlier checkpoints are untouched.
    """
    final = step_folder(directory, step)
    partial, replaced = (final.with_name(final.name + suffix) for suffix in (PARTIAL, REPLACED))
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
    """Return the complete checkpoints in `directory`, lowest step first. Empty if the directory does not exist."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (_step(path), path))


def step_of(path: Path) -> int | None:
    """Return the step that a checkpoint's folder is named after; None for a folder of another name."""
    return _step(path) if STEP.fullmatch(path.name) else None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def prune_checkpoints(
    directory: Path, keep: int, newest: int | None = None, best: int | None = None, keep_every: int = 0
) -> list[Path]:
    """Remove all but `keep` checkpoints, those of the highest steps, and return the removed; 0 keeps all.

    `newest` is the step that was just saved. Checkpoints of higher steps belong to an earlier run: they neither count
    nor are removed, so the new one always stays. So does that of the step `best`, which is one of the `keep`, or a
    second one. Those of every `keep_every` steps stay and do not count. Each is renamed before it is deleted, so that
    every checkpoint that has its name is complete.
    """
    own = [path for path in list_checkpoints(directory) if newest is None or _step(path) <= newest]
    counted = [path for path in own if not keep_every or _step(path) % keep_every]
    kept = counted[-keep:]
    if any(_step(path) == best for path in counted[:-keep]):
        kept = [path for path in counted if _step(path) == best] + counted[-max(keep - 1, 1) :]
    removed = [path for path in counted if path not in kept] if keep > 0 else []
    for path in removed:
        doomed = path.with_name(path.name + REMOVED)
        with stopping_when_disk_refuses(path, safe_in=directory, doing="removing"):
            _remove(doomed)
            path.rename(doomed)
            _remove(doomed)
    return removed


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what a killed run left half-written or half-deleted, and return it. Call it before the next run writes.

    See also `restore_replaced`, which this calls first.
    """
    restore_replaced(directory)
    removed = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        of_a_step = STEP.fullmatch(path.stem) is not None and path.suffix in (PARTIAL, REPLACED, REMOVED)
        if of_a_step or path.name.startswith(SAVING):
            _remove(path)
            removed.append(path)
    return removed


_MOVED = "files.json"
"""In a `SAVING` folder: the files that are being moved out of it, and which of them is moved last."""


def write_moved(fresh: Path, last: str) -> None:
    """Note in a `SAVING` folder what it holds, for `half_moved`, before the first file is moved."""
    names = sorted(path.name for path in fresh.iterdir())
    (fresh / _MOVED).write_text(json.dumps({"last": last, "files": names}), encoding="utf-8")
    sync(fresh / _MOVED)
    sync(fresh)


def half_moved(directory: Path) -> frozenset[str]:
    """Return the names of files that a killed save may have moved in: they are of a model or adapter that is not
    whole."""
    names: set[str] = set()
    for path in directory.glob(f"{SAVING}*/{_MOVED}"):
        with suppress(ConfigError):  # killed while it wrote them: nothing was moved
            noted = read_json_object(path)
            if (path.parent / str(noted.get("last"))).exists():  # else it was killed after the last one
                names |= {str(name) for name in noted.get("files") or ()}
    return frozenset(names)


def restore_replaced(directory: Path) -> None:
    """Give a checkpoint that was being replaced its name back if the run was killed before the new one took it."""
    for path in directory.glob(f"step_*{REPLACED}"):
        if STEP.fullmatch(path.stem) and not path.with_name(path.stem).exists():
            path.rename(path.with_name(path.stem))


def set_aside(directory: Path, after: int) -> list[Path]:
    """Set aside the checkpoints of later steps than `after`, -1 for all. Return their new paths.

    `after` is the step that a run resumes from: a later resume must not take them for its own.
    """
    return [rename_aside(path) for path in list_checkpoints(directory) if _step(path) > after]


def rename_aside(path: Path) -> Path:
    return path.rename(free_name(path))


def free_name(path: Path) -> Path:
    """Return the first free name for setting `path` aside."""
    names = (path.with_name(f"{path.name}{_ASIDE}{n or ''}") for n in count())
    return next(name for name in names if not name.exists())


# ------------------------------------------------------------------------------------------------------ durable writes


def refused_by_disk(error: BaseException | None) -> bool:
    """Return whether an error is one that `stopping_when_disk_refuses` turns into RunStopped."""
    return isinstance(error, OSError) and error.errno in _STOPPING


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Create a folder and its parents. If the block fails, remove those that are new and empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def stopping_when_disk_refuses(target: Path, *, safe_in: Path | None, doing: str = "saving") -> Iterator[None]:
    """Turn errors of a full, read-only or failing disk into RunStopped, naming the failed action and what is safe.

    `safe_in`: the folder of a run's checkpoints, of which the newest complete one is named; None: there is no run.
    """
    try:
        yield
    except OSError as error:
        if not refused_by_disk(error):
            raise
        full, at = error.errno in DISK_IS_FULL, error.filename
        read = not full and isinstance(at, str) and not Path(at).is_relative_to(target)  # a file that is copied
        said = [f"{doing} {target} failed: {f'{at}: ' if read else ''}{error.strerror}."]
        if safe_in is not None:
            complete = list_checkpoints(safe_in)
            said.append(
                f"The newest complete checkpoint is {complete[-1]}." if complete else "No checkpoint is complete yet."
            )
        if full:
            said.append("Free some space or lower save_total_limit." if safe_in is not None else "Free some space.")
        raise RunStopped(" ".join(said)) from error


def sync(path: Path) -> None:
    """Sync a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        sync(path)
    sync(directory)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
