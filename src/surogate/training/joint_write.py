"""Files that the processes of a run write together: each its own, into one folder that all of them see."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surogate_core.errors import ConfigError, RunStopped

from ..checkpoints.folders import SAVING, stopping_when_disk_refuses, sync
from ..world.processes import Processes

_SERIES = "saves/"

Files = dict[str, dict[str, Any]]
"""Files below a folder, as a manifest has them."""


def write_together(
    processes: Processes, folder: Path | None, write: Callable[[Path], Mapping[str, str]]
) -> tuple[Mapping[str, str], Files]:
    """Have every process write into the folder that the writer gives, and return when this one has.

    `write`: (folder) -> {file: hash}. In the writer, which waits for all, return the hashes of its own files, and the
    files of the others, which it neither lists nor reads. May be called on any thread, one at a time.

    Raises what `write` raises; in the writer RunStopped if another process could not write.
    """
    given = str(folder.resolve()) if folder else None
    where = Path(processes.share(given, "the folder of a save", series=_SERIES))
    failure: Exception | None = None
    report: dict[str, Any]
    hashes: Mapping[str, str] = {}
    try:
        hashes = write(where)
        report = {"files": {} if folder else _synced(where, hashes)}
    except Exception as error:
        failure, report = error, {"error": str(error) or type(error).__name__}
    reports = processes.report(report, "the end of a save", series=_SERIES)
    if failure is not None:
        raise failure
    others: Files = {}
    for process, found in enumerate(reports):
        if "error" in found:
            raise RunStopped(f"process {process} of {processes.world.processes}: {found['error']}")
        others |= found["files"]
    return hashes, others


def _synced(folder: Path, hashes: Mapping[str, str]) -> Files:
    """Sync files and the folders that hold their names to the disk, and return the files."""
    for path in dict.fromkeys(path for name in hashes for path in (folder / name, (folder / name).parent)):
        sync(path)
    return {name: {"bytes": (folder / name).stat().st_size, "xxh3_128": digest} for name, digest in hashes.items()}


def refuse_unshared(processes: Processes, key: str, folder: Path) -> None:
    """Raise ConfigError, in every process, unless all see the writer's `folder`, which `key` names and which exists."""
    path, writer = folder.resolve() / f"{SAVING}{secrets.token_hex(16)}", processes.world.writer
    try:
        if writer:
            with stopping_when_disk_refuses(path, safe_in=None, doing="writing"):
                path.write_text(path.name)
        path = Path(processes.share(str(path), "the check of folders"))
        found = processes.gather([_read(path) == path.name, socket.gethostname()], "the check of folders")
    finally:
        if writer:
            path.unlink(missing_ok=True)
    for process, (sees, host) in enumerate(found):
        if not sees:
            raise ConfigError(
                f"{key}: process {process} (host {host}) does not see {path.parent} of process 0. Masters and "
                "optimizer states are divided among the ranks, and every process saves its own: name a folder on a "
                "file system that all machines of the run share."
            )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
