"""The rows of a `datasets:` entry: files, by path, pattern or URL, or a dataset of the Hugging Face Hub."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from surogate_core.api.sealed import sealed, unsealed
from surogate_core.errors import ConfigError

from ..config.dataset_entry import DatasetEntry
from ..hub.files import find_local, hub_remedy, looks_like_repo
from ..machine.progress import print_notice
from ..machine.replaced_file import replaced
from .columns import Columns
from .divide import Divide, anywhere, whole
from .parquet import read_parquet_tables, without_nulls
from .readers import KINDS, READABLE, kind_of, place, read_file
from .remote_files import fetched, is_remote
from .row import Largest, Row, missing_column
from .rows_file import SUFFIX, RowsSource

HUB_ROWS = 1024
_MOST_NAMES = 5


class Source(Protocol):
    """The rows of a dataset."""

    def content_hash(self) -> str:
        """Return a hash of everything that determines the rows."""

    def rows(
        self, columns: Sequence[str] | None, optional: Sequence[str] = (), divide: Divide = whole
    ) -> Iterator[Row]:
        """Yield the rows in order, each with at least `columns`; a missing column of `optional` becomes None.

        divide: how a text that need not be in memory whole becomes rows that are its parts.

        Raises ConfigError naming file and line.
        """

    def place(self, file: int, number: int) -> str:
        """Return the place of the row with these numbers, as messages name it."""

    def count_columns(self) -> Columns:
        """Return the columns of all rows. Raises ConfigError as `rows` does."""

    def left_out(self) -> str | None:
        """Return a line for the user about files that are not read; None if there are none."""


def open_source(entry: DatasetEntry, sample_by: str = "document", where: str = "datasets") -> Source:
    """Find the rows of `entry`. Raises ConfigError, beginning with `where`, if they cannot be found."""
    largest = Largest(entry.max_row_bytes, entry.max_document_bytes)
    if entry.path.endswith(SUFFIX):
        return RowsSource(Path(entry.path), where, entry.samples, largest)
    remote = is_remote(entry.path)
    files, others = _local_files(fetched(entry.path, KINDS, where) if remote else entry.path, where)
    if not files:
        return HubSource(entry.path, entry.subset, entry.split, entry.samples, where)
    what = "a URL" if remote else "local"
    if entry.subset is not None:
        raise ConfigError(
            f"{where}: subset: {entry.subset} is for Hub datasets, but {entry.path} is {what}. Remove it."
        )
    if entry.split != "train":
        raise ConfigError(
            f"{where}: split: {entry.split} is for Hub datasets, but {entry.path} is {what}. "
            "Name the files of the split in path."
        )
    return FileSource(tuple(files), sample_by, entry.samples, tuple(others), largest)


@dataclass(frozen=True)
class FileSource:
    """Local files, read in order."""

    files: tuple[Path, ...]
    sample_by: str
    samples: int | None
    others: tuple[Path, ...] = ()
    """Files of the same directory whose kind cannot be read."""
    largest: Largest = field(default_factory=Largest)

    def content_hash(self) -> str:
        """Return a sha256 over the kind and the bytes of each file; names and locations do not matter."""
        return self._content_hash

    @cached_property
    def _content_hash(self) -> str:
        with ThreadPoolExecutor(min(len(self.files), os.cpu_count() or 1)) as pool:
            digests = list(pool.map(_file_digest, self.files))
        return hashlib.sha256("\n".join([*digests, self.sample_by, str(self.samples)]).encode()).hexdigest()

    def rows(
        self, columns: Sequence[str] | None, optional: Sequence[str] = (), divide: Divide = whole
    ) -> Iterator[Row]:
        read = partial(
            read_file,
            columns=columns,
            sample_by=self.sample_by,
            optional=optional,
            largest=self.largest,
            divide=divide,
        )
        every = (replace(row, file=file) for file, path in enumerate(self.files) for row in read(path))
        return every if self.samples is None else _first(every, self.samples)

    def place(self, file: int, number: int) -> str:
        return place(self.files[file], number)

    def count_columns(self) -> Columns:
        columns = Columns()
        if self.files[0].suffix.lower() != ".parquet":  # all files are of one kind
            for row in self.rows(None, divide=anywhere):
                if row.first:  # it is filled if the text is
                    columns.add_row(row)
            return columns
        for path in self.files:
            for batch in read_parquet_tables(path, self.largest):
                columns.add_table(batch if self.samples is None else batch.slice(0, self.samples - columns.rows))
                if columns.rows == self.samples:
                    return columns
        return columns

    def left_out(self) -> str | None:
        if not self.others:
            return None
        names = ", ".join(path.name for path in self.others[:_MOST_NAMES])
        more = f" and {len(self.others) - _MOST_NAMES:,} more" if len(self.others) > _MOST_NAMES else ""
        return f"files not read, since their kind is none of {READABLE}: {names}{more}"


def _first(rows: Iterator[Row], count: int) -> Iterator[Row]:
    for row in rows:
        yield row
        count -= row.last
        if count == 0:
            return


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"{kind_of(path)} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or error}. Check the file and its permissions."
        ) from error


def _local_files(path: str, where: str) -> tuple[list[Path], list[Path]]:
    """Return (files to read, other files), sorted. Both are empty if `path` can only name a Hub dataset."""
    others: list[Path] = []
    local = find_local(path)
    if local is not None and local.is_file():
        files = [local]
    elif local is not None:
        below = sorted(_files_below(local))
        files = [file for file in below if kind_of(file) in KINDS]
        others = [file for file in below if kind_of(file) not in KINDS]
        files = files or [file for file in below if file.suffix.lower() in _UNPACK]  # refused, with what to do
        if not files:
            raise ConfigError(f"{where}: path: directory {path} contains no file that is {READABLE}. Name another.")
    elif glob.has_magic(path):
        found = map(Path, glob.glob(os.path.expanduser(path), recursive=True))
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise ConfigError(f"{where}: path: no file matches {path} (searched from {Path.cwd()}). Check the pattern.")
    elif looks_like_repo(path) and not path.lower().endswith(KINDS):
        return [], []
    else:
        raise ConfigError(
            f"{where}: path: {path} does not exist (searched from {Path.cwd()}). "
            "Name a file, a directory, a glob, or a Hugging Face dataset as owner/name."
        )
    _check_kinds(path, files, where)
    return files, others


def _files_below(directory: Path) -> Iterator[Path]:
    for file in directory.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
        if file.is_file() and not hidden:
            yield file


_UNPACK = {".gz": "gunzip -k", ".zst": "zstd -d", ".zip": "unzip", ".bz2": "bunzip2 -k", ".xz": "unxz -k"}


def _check_kinds(path: str, files: Sequence[Path], where: str) -> None:
    for file in files:
        if kind_of(file) not in KINDS:
            command = _UNPACK.get(file.suffix.lower())
            remedy = f"Unpack it: {command} {shlex.quote(str(file))}" if command else "Convert it, or rename it."
            raise ConfigError(f"{where}: path: {file} is none of {READABLE}. {remedy}")
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        folder = path.rstrip("/") if Path(path).expanduser().is_dir() else "FOLDER"
        entries = "".join(f"\n  - path: {json.dumps(f'{folder}/**/*{kind}')}" for kind in kinds)
        raise ConfigError(
            f"{where}: path: {path} contains files of several kinds ({', '.join(kinds)}), whose columns may differ, "
            f"or whose rows may be the same. Give each kind to read an entry of its own:{entries}"
        )


class HubSource:
    """A dataset of the Hugging Face Hub, loaded and cached on disk by the `datasets` library.

    The library honours HF_HOME, HF_TOKEN and HF_HUB_OFFLINE. No code of the repository runs.
    """

    def __init__(self, name: str, subset: str | None, split: str, samples: int | None, where: str) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(
                f"{where}: path: {name} is not a local path, and a Hub dataset needs the datasets library: {error}. "
                "Install it (pip install datasets), or check the path."
            ) from error
        try:
            self._table: Any = datasets.load_dataset(name, subset, split=split)
        except Exception as error:  # exceptions of the library, of its HTTP client and of the system
            raise ConfigError(
                f"{where}: path: {name} (subset {subset or 'default'}, split {split}) is not a local path and could "
                f"not be loaded from the Hugging Face Hub. {hub_remedy(error)}"
            ) from error
        self._name = f"{name}[{split}]"
        if samples is not None:
            self._table = self._table.select(range(min(samples, len(self._table))))

    def content_hash(self) -> str:
        return hashlib.sha256(str(self._table._fingerprint).encode()).hexdigest()

    def rows(
        self, columns: Sequence[str] | None, optional: Sequence[str] = (), divide: Divide = whole
    ) -> Iterator[Row]:
        table = self._table
        available = [str(name) for name in table.column_names]
        absent = [column for column in columns or () if column not in available]
        for column in absent:
            if column not in optional:
                raise missing_column(self._name, column, available)
        wanted = [column for column in columns or () if column in available]
        table = table.select_columns(wanted) if wanted else table
        number = 0
        for batch in table.with_format("arrow").iter(batch_size=HUB_ROWS):  # images stay bytes
            names = batch.column_names
            for cells in zip(*batch.to_pydict().values(), strict=True):
                values = {name: without_nulls(cell) for name, cell in zip(names, cells, strict=True)}
                yield Row(self.place(0, number), {**values, **dict.fromkeys(absent)}, number)
                number += 1

    def place(self, file: int, number: int) -> str:
        return f"{self._name} row {number}"

    def count_columns(self) -> Columns:
        columns = Columns()
        for batch in self._table.with_format("arrow").iter(batch_size=HUB_ROWS):
            columns.add_table(batch)
        return columns

    def left_out(self) -> str | None:
        return None


_COUNTS_VERSION = 2


def count_columns(source: Source, cache: Path, notice: Callable[[str], None] = print_notice) -> Columns:
    """Count the columns of all rows of `source`. The first call reads every row, later calls a small file in `cache`.

    A damaged file is named to `notice`, and made anew. Raises ConfigError naming file and line if a row cannot be read,
    and OSError if `cache` cannot be written.
    """
    path = cache / "columns" / f"{source.content_hash()}.json"
    try:
        return _read_counts(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        notice(f"the cached columns of the data are damaged and will be counted again: {path}: {error}")
    columns = source.count_columns()
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = {"version": _COUNTS_VERSION, "rows": columns.rows, "filled": columns.filled}
    with replaced(path) as fresh:
        fresh.write_text(json.dumps(sealed(counts)))
    return columns


def _read_counts(path: Path) -> Columns:
    """Return the counts of an earlier call. Version 1, of 0.1.0 and 0.2.0, has no hash of itself."""
    known = json.loads(path.read_text(encoding="utf-8"))
    if known["version"] != 1:
        known = unsealed(known)
    if known["version"] not in (1, _COUNTS_VERSION):
        raise ValueError(f"version {known['version']!r}, this one reads 1 to {_COUNTS_VERSION}")
    return Columns(int(known["rows"]), {str(name): int(count) for name, count in known["filled"].items()})
