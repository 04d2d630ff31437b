"""Data in memory, as a script gives it in place of a path: it is read once, and becomes a file of rows in the cache.

Taken are a list of rows, a `datasets.Dataset` or `IterableDataset`, any other iterable of rows, such as a generator,
and a function without arguments that returns one. A row is a mapping of columns to what JSON has: text, numbers, lists,
objects. NumPy arrays and tensors become lists, dates become text.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from tempfile import NamedTemporaryFile
from typing import IO, Any

from surogate_core.errors import ConfigError, RunStopped, described

from ..machine.cache_home import cache_home
from ..machine.progress import Progress
from .parquet import without_nulls
from .rows_file import SUFFIX

KEYS = ("datasets", "validation_datasets")
"""Keys of a config whose entries may hold data in memory."""
UNREAD = "data in memory"
"""The path of data that a plan has not read."""

ARROW_ROWS = 1024
CHECKED_ROWS = 1024
"""Rows after which the room on the disk is compared again."""

Notice = Callable[[str], None]
Store = Callable[[str, Any, int | None], str]
"""(place of the entry, data in memory, its `samples`) -> the path that stands for the data."""


def unread(where: str, given: Any, samples: int | None) -> str:
    """Stand for data without reading it."""
    return UNREAD


def with_paths(keys: Mapping[str, Any], store: Store) -> dict[str, Any]:
    """Return keys of a config in which a path stands for all data in memory."""
    return {key: _entries(key, value, store) if key in KEYS else value for key, value in keys.items()}


def _entries(key: str, value: Any, store: Store) -> Any:
    """Return the entries of a key. All else is returned as it is: the config takes it or refuses it."""
    if _is_data(value) or isinstance(value, os.PathLike):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return [_entry(f"{key}.{index}", entry, store) for index, entry in enumerate(value)]


def _is_data(value: Any) -> bool:
    """Return whether a value is one set of rows: anything but text, an entry or a list of entries."""
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping) and bool(value[0]) and "path" not in value[0]
    return value is not None and not isinstance(value, str | bytes | int | float | os.PathLike | Mapping)


def _entry(where: str, entry: Any, store: Store) -> Any:
    if isinstance(entry, os.PathLike):
        return os.fspath(entry)
    entry = {"path": entry} if _is_data(entry) else entry
    if not isinstance(entry, Mapping) or isinstance(entry.get("path"), str | int | float | os.PathLike | None):
        return entry
    samples = entry.get("samples")
    return {**entry, "path": store(where, entry["path"], samples if isinstance(samples, int) else None)}


@dataclass(frozen=True)
class RowsCache:
    """Files of rows, by default in `$XDG_CACHE_HOME/surogate/rows`. A file is named after its bytes, and so is reused.

    notice: called with where the rows of an entry are. room: the part of the free disk that may be filled.
    """

    notice: Notice
    room: float = 0.5

    def store(self, where: str, given: Any, samples: int | None) -> str:
        """Write the rows of an entry and return the path of the file.

        samples: rows to read; None: all. Raises ConfigError, with the row, for what is no row, for an iterable that
        raises, has no rows, ends before `samples` or does not end; and RunStopped if the disk is full.
        """
        folder = cache_home() / "rows"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            with NamedTemporaryFile(dir=folder, prefix="writing-", delete=False) as file:
                try:
                    digest, count = self._write(file, where, given, samples, int(free * self.room))
                    path = folder / f"{digest}{SUFFIX}"
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            raise RunStopped(
                f"{where}: cannot write rows to {folder}: {error.strerror or error}. Make room, or set XDG_CACHE_HOME."
            ) from error
        self.notice(f"{where}: {count:,} row{'s' * (count != 1)} of {_kind(given)}, in {path}")
        return str(path)

    def _write(self, file: IO[bytes], where: str, given: Any, samples: int | None, room: int) -> tuple[str, int]:
        digest, size, count, first = hashlib.sha256(), 0, 0, frozenset[str]()
        with Progress(f"{where}: reading", "rows", samples, self.notice) as shown:
            for count, row in enumerate(_rows(given, where, samples), 1):
                place = f"{where} row {count - 1}"
                line = _line(row, place)
                first = _refuse_other_columns(row, first, place)
                digest.update(line)
                file.write(line)
                size += len(line)
                shown(count)
                if count % CHECKED_ROWS == 0 and size > room:
                    raise ConfigError(
                        f"{place}: {_kind(given)} has not ended after {size:,} bytes, {self.room:.0%} of what was free "
                        "in the cache. Set samples, the number of rows to read, or XDG_CACHE_HOME."
                    )
        if not count:
            raise ConfigError(
                f"{where}: {_kind(given)} has no rows. An iterator can be read once: give a list, or a function that "
                "returns a new one."
            )
        if samples is not None and count < samples and not hasattr(given, "__len__"):
            raise ConfigError(
                f"{where} row {count - 1}: {_kind(given)} ended after {count:,} rows, and samples is {samples:,}. "
                "Lower samples, or give all rows."
            )
        return digest.hexdigest(), count


def _rows(given: Any, where: str, samples: int | None) -> Iterator[Any]:
    """Yield the rows, at most `samples`. What reading them raises is a ConfigError with the number of the row."""
    count = 0
    try:
        for row in () if samples == 0 else _iterable(given, where):
            yield row
            count += 1
            if count == samples:
                return
    except (ConfigError, RunStopped):
        raise
    except Exception as error:  # of the code that makes rows
        raise ConfigError(
            f"{where} row {count}: reading {_kind(given)} failed: {described(error)}. Nothing is trained: mend it, and "
            "run again."
        ) from error


def _iterable(given: Any, where: str) -> Iterable[Any]:
    if isinstance(given, Mapping):
        names = ", ".join(map(str, given))
        raise ConfigError(f"{where}: is a mapping of {names}, not rows. Give one of its values, or a list of rows.")
    if hasattr(given, "to_dict") and hasattr(given, "itertuples"):
        raise ConfigError(f"{where}: is a table of pandas. Give its rows: table.to_dict('records').")
    if callable(given) and not hasattr(given, "__iter__"):
        given = given()
    if not _of_hub_library(given):
        if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
            raise ConfigError(f"{where}: is {_kind(given)}, which has no rows. Give a list or an iterable of them.")
        found: Iterable[Any] = given
        return found
    return _arrow_rows(given) if hasattr(given, "__len__") else map(_clean, given.with_format(None))


def _of_hub_library(given: Any) -> bool:
    """Return whether it is a data set of the library `datasets`, which a script has imported then."""
    return type(given).__module__.partition(".")[0] == "datasets" and hasattr(given, "with_format")


def _arrow_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `Dataset`, of the columns that its format has; those of a transform are what it returns."""
    if table.format["type"] == "custom":
        yield from map(_clean, table)
        return
    arrow = table.with_format("arrow", columns=table.format["columns"])
    for batch in arrow.iter(batch_size=ARROW_ROWS):  # images stay bytes
        names = batch.column_names
        for cells in zip(*batch.to_pydict().values(), strict=True):
            yield {name: without_nulls(cell) for name, cell in zip(names, cells, strict=True)}


def _clean(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: without_nulls(cell) for name, cell in row.items()}


def _kind(given: Any) -> str:
    name = getattr(given, "__name__", "")  # of a function or a generator
    return f"{type(given).__name__} {name if name.isidentifier() else ''}".rstrip()


def _line(row: Any, place: str) -> bytes:
    """Return a row as a line of JSON. Raises ConfigError with the column for what JSON has not."""
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"{place}: is {type(row).__name__}, not a mapping of columns. Give rows such as {{'text': ...}}."
        )
    if not all(isinstance(column, str) for column in row):
        named = next(column for column in row if not isinstance(column, str))
        raise ConfigError(f"{place}: has a column {named!r}, whose name is no text. Rename it.")
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_plain).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {_fault(row, error)}") from error


def _plain(value: Any) -> Any:
    """Return what JSON has in place of a value of another library. Raises TypeError for what it has nothing for."""
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # of numpy and torch
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is neither text, a number, a list nor an object")


def _fault(row: Mapping[str, Any], error: Exception) -> str:
    """Return which column of a row cannot be written, and what to do."""
    for column, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as fault:
            if _holds_media(value):
                return (
                    f"column {column!r} holds an image, a sound or other bytes, and rows are text. Remove the column "
                    f"(dataset.remove_columns({column!r})), or describe it in words."
                )
            return f"column {column!r} cannot be written as JSON: {fault}. Convert or remove it."
    return f"cannot be written as JSON: {error}. Correct or remove it."


def _holds_media(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_media, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_media, value))
    of_images = type(value).__module__.partition(".")[0] in ("PIL", "torchcodec", "datasets")
    return of_images or isinstance(value, bytes | bytearray | memoryview)


def _refuse_other_columns(row: Mapping[str, Any], first: frozenset[str], place: str) -> frozenset[str]:
    """Return the columns of the first row. Raises ConfigError for a row that has none of them."""
    if not first or not first.isdisjoint(row):
        return first or frozenset(row)
    shown: Sequence[str] = sorted(first)
    raise ConfigError(
        f"{place}: has the columns {', '.join(row) or '(none)'}, and the first row {', '.join(shown)}. Give rows of "
        "another form as an entry of their own."
    )
