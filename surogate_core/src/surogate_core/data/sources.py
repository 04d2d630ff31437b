"""Rows of a `datasets:` entry: a local file, a directory, a glob, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from ..hub import find_local, hub_remedy, looks_like_repo
from .readers import SUFFIXES, Row, missing_column, read_file, without_nulls

HUB_ROWS = 1024


class DatasetEntry(Protocol):
    """The keys of a `datasets:` entry that every type has.

    path: file, directory, glob or hub name. subset, split: of a hub dataset. samples: the first so many rows only.
    """

    @property
    def path(self) -> str: ...
    @property
    def subset(self) -> str | None: ...
    @property
    def split(self) -> str: ...
    @property
    def samples(self) -> int | None: ...


class Source(Protocol):
    """Rows with a name for their content."""

    def content_hash(self) -> str:
        """Equal when the rows are equal."""
        ...

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        """Rows in order, each with at least `columns`. Raises ConfigError naming file and line."""
        ...


def open_source(entry: DatasetEntry, sample_by: str = "document", where: str = "datasets") -> Source:
    """Find the rows of `entry`. Raises ConfigError, beginning with `where`, when there are none to be found."""
    if entry.samples is not None and entry.samples < 1:
        raise ConfigError(f"{where}: samples: {entry.samples} is no number of rows. Give 1 or more, or remove it.")
    files = _local_files(entry.path, where)
    if files is None:
        return HubSource(entry.path, entry.subset, entry.split, entry.samples, where)
    if entry.subset is not None:
        raise ConfigError(f"{where}: subset: {entry.subset} is for hub datasets, but {entry.path} is local. Remove it.")
    if entry.split != "train":
        raise ConfigError(
            f"{where}: split: {entry.split} is for hub datasets, but {entry.path} is local. "
            "Name the split's own files in path."
        )
    return FileSource(tuple(files), sample_by, entry.samples)


def columns_of(source: Source) -> list[str]:
    """Column names of the first row."""
    return [str(name) for name in next(iter(source.rows(None))).values]


@dataclass(frozen=True)
class FileSource:
    """Local files, read one after the other."""

    files: tuple[Path, ...]
    sample_by: str
    samples: int | None

    def content_hash(self) -> str:
        """sha256 over the kind and the bytes of each file; their names and places do not matter."""
        with ThreadPoolExecutor(min(len(self.files), os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_file_digest, self.files))
        return hashlib.sha256("\n".join([*digests, self.sample_by, str(self.samples)]).encode()).hexdigest()

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        every = itertools.chain.from_iterable(read_file(path, columns, self.sample_by) for path in self.files)
        return itertools.islice(every, self.samples)


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"{path.suffix.lower()} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or error}. Check the file and its rights."
        ) from error


def _local_files(path: str, where: str) -> list[Path] | None:
    """Files in a fixed order, or None when `path` can only be the name of a hub dataset."""
    if "://" in path:
        raise ConfigError(f"{where}: path: {path} is a URL, which is not supported yet. Download it and name the file.")
    local = find_local(path)
    if local is not None and local.is_file():
        files = [local]
    elif local is not None:
        files = sorted(_files_below(local))
        if not files:
            raise ConfigError(f"{where}: path: directory {path} holds no {', '.join(SUFFIXES)} file. Name another.")
    elif glob.has_magic(path):
        files = sorted(
            file for file in map(Path, glob.glob(os.path.expanduser(path), recursive=True)) if file.is_file()
        )
        if not files:
            raise ConfigError(f"{where}: path: no file matches {path} (looked from {Path.cwd()}). Check the pattern.")
    elif looks_like_repo(path) and not path.lower().endswith(SUFFIXES):
        return None
    else:
        raise ConfigError(
            f"{where}: path: {path} does not exist (looked from {Path.cwd()}). "
            "Name a file, a directory, a glob, or a Hugging Face dataset as owner/name."
        )
    _check_kinds(path, files, where)
    return files


def _files_below(directory: Path) -> Iterator[Path]:
    for file in directory.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
        if file.is_file() and not hidden and file.suffix.lower() in SUFFIXES:
            yield file


def _check_kinds(path: str, files: Sequence[Path], where: str) -> None:
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"{where}: path: {file} is none of {', '.join(SUFFIXES)}. Convert it, or rename it.")
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) > 1:
        raise ConfigError(
            f"{where}: path: {path} holds files of several kinds ({', '.join(kinds)}). "
            f"Name one kind by a glob that ends in *{kinds[0]}."
        )


class HubSource:
    """A dataset of the Hugging Face hub through the `datasets` library, which caches it on disk.

    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured by the library; no code of the repository runs.
    """

    def __init__(self, name: str, subset: str | None, split: str, samples: int | None, where: str) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(
                f"{where}: path: {name} is no local path, and a hub dataset needs the datasets library: {error}. "
                "Install it (pip install datasets), or check the path."
            ) from error
        try:
            self._table: Any = datasets.load_dataset(name, subset, split=split)
        except Exception as error:  # the library raises its own, its HTTP client's and the system's exceptions
            raise ConfigError(
                f"{where}: path: {name} (subset {subset or 'default'}, split {split}) is no local path and could not "
                f"be loaded from the Hugging Face hub. {hub_remedy(error)}"
            ) from error
        self._name = f"{name}[{split}]"
        if samples is not None:
            self._table = self._table.select(range(min(samples, len(self._table))))

    def content_hash(self) -> str:
        return hashlib.sha256(str(self._table._fingerprint).encode()).hexdigest()

    def rows(self, columns: Sequence[str] | None) -> Iterator[Row]:
        table = self._table
        for column in columns or ():
            if column not in table.column_names:
                raise missing_column(self._name, column, table.column_names)
        table = table.select_columns(list(columns)) if columns else table
        number = 0
        for batch in table.iter(batch_size=HUB_ROWS):
            names = list(batch)
            for cells in zip(*batch.values(), strict=True):
                values = {name: without_nulls(cell) for name, cell in zip(names, cells, strict=True)}
                yield Row(f"{self._name} row {number}", values)
                number += 1
