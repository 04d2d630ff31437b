"""Data behind a URL: its files are copied into the cache by fsspec, once for each state in which they are found there.

Whatever fsspec knows can be named: `https://`, `s3://`, `gs://`, `hf://`, `file://`; some need a package of their own,
which the error names. Credentials are those of that package, from the environment.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import filelock

from surogate_core.errors import ConfigError, described

from ..machine.cache_home import cache_home
from ..machine.progress import print_notice

Notice = Callable[[str], None]


def is_remote(path: str) -> bool:
    return "://" in path


def fetched(url: str, kinds: Sequence[str], where: str, notice: Notice = print_notice) -> str:
    """Return the local path of what `url` names: of a file a copy, of a folder or a glob a folder with copies.

    kinds: suffixes of the files of a folder that are copied. The files are looked at again at every call, and copied
    again if one of them has changed. Raises ConfigError, beginning with `where`, if they cannot be had.
    """
    try:
        import fsspec

        files, root = fsspec.url_to_fs(url)
        found = _found(files, root, kinds)
        states = {path: files.info(path) for path in found}
    except ImportError as error:
        raise ConfigError(f"{where}: path: {url}: {error}. Install it, or download the data and name it.") from error
    except Exception as error:  # of fsspec, of its packages and of the system
        raise ConfigError(f"{where}: path: {url}: {_why(error)}") from error
    if not found:
        raise ConfigError(f"{where}: path: {url} names no file that is one of {', '.join(kinds)}. Check it.")
    folder = cache_home() / "remote" / _name(url, states)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            notice(f"{where}: copying {len(found):,} file{'s' * (len(found) != 1)} of {url}")
            try:
                _copy(files, root, found, folder)
            except Exception as error:
                raise ConfigError(f"{where}: path: {url}: {_why(error)}") from error
    return str(folder / _below(root, found[0]) if found == [root] else folder)


def _found(files: Any, root: str, kinds: Sequence[str]) -> list[str]:
    """Return the files that a path names, sorted. A page of a web server may look like a folder: it is a file."""
    if glob.has_magic(root):
        return sorted(path for path in files.glob(root) if files.isfile(path))
    web = "http" in files.protocol or "https" in files.protocol
    if web or not files.isdir(root):
        return [root]
    return [path for path in sorted(files.find(root)) if path.lower().endswith(tuple(kinds))]


def _name(url: str, states: dict[str, Any]) -> str:
    """Return a name for files in a state: their sizes, and whatever tells versions apart (times, tags, hashes)."""
    known = [(path, sorted((key, str(value)) for key, value in state.items())) for path, state in states.items()]
    return hashlib.sha256(repr((url, known)).encode()).hexdigest()[:32]


def _copy(files: Any, root: str, found: Sequence[str], folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    for path in found:
        target = partial / _below(root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(path, str(target))
    os.replace(partial, folder)


def _below(root: str, path: str) -> PurePosixPath:
    """Return the path of a copy in its folder. Raises ValueError for one that would lie outside."""
    within = path.removeprefix(root).lstrip("/") if path != root and not glob.has_magic(root) else ""
    below = PurePosixPath(within or _file_name(path))
    if glob.has_magic(root):  # folders may have files of one name
        below = PurePosixPath(hashlib.sha256(path.encode()).hexdigest()[:8]) / below
    if ".." in below.parts or below.is_absolute():
        raise ValueError(f"{path} has a name that leaves its folder")
    return below


def _file_name(path: str) -> str:
    """Return the name of a file; of one on the web without what follows a question mark."""
    return unquote(PurePosixPath(urlsplit(path).path).name) if is_remote(path) else PurePosixPath(path).name


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "does not exist. Check the URL."
    if isinstance(error, PermissionError):
        return f"is not open to you ({described(error)}). Set the credentials of that store in the environment."
    return f"{described(error)}. Check the URL, the network and the credentials, or download the data and name it."
