"""Readers of local files, one row at a time: txt, jsonl, json, csv, parquet.

Every reader raises ConfigError that names the file and, if possible, the line.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from surogate_core.api.json_object import RepeatedKey, unique_keys
from surogate_core.errors import ConfigError

from .divide import Divide, whole
from .parquet import read_parquet
from .row import Largest, Row, Wanted, refuse_repeated_columns, with_columns
from .text_document import read_document

CHUNK_BYTES = 1 << 20

_VALUES = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}


def read_file(
    path: Path,
    columns: Sequence[str] | None,
    sample_by: str = "document",
    optional: Sequence[str] = (),
    largest: Largest | None = None,
    divide: Divide = whole,
) -> Iterator[Row]:
    """Yield the rows of `path`, each with at least `columns`; None: all columns.

    sample_by: what a row of a .txt file is. divide: how one that is a document becomes rows that are its parts. A
    missing column becomes None if it is in `optional`. Raises ConfigError if the file is empty, damaged, or not UTF-8,
    has two columns of one name, lacks a column that is not optional, or has a row that is larger than `largest`.
    """
    reader = _READERS[kind_of(path)]
    if reader is not _read_txt and sample_by != "document":
        raise ConfigError(f"{path}: sample_by: {sample_by} is for .txt files. Remove it.")
    wanted = Wanted(columns or (), optional, sample_by, largest or Largest(), divide)
    count = 0
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"{path}: the file is empty. Remove it, or create it again.")
        for row in reader(path, wanted):
            count += 1
            yield with_columns(row, wanted)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or error}. Check the file and its permissions."
        ) from error
    if count == 0:
        raise ConfigError(f"{path}: contains no rows. Remove it, or create it again.")


def kind_of_value(value: object) -> str:
    """Return what a cell holds, for messages."""
    return "null" if value is None else f"{_VALUES.get(type(value), type(value).__name__)} ({str(value)[:40]})"


def _decode(data: bytes | bytearray, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}. Convert it (iconv -t UTF-8)."
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read its bytes; those of a compressed file are decompressed as they are read."""
    name = COMPRESSED.get(path.suffix.lower(), "io")
    try:
        module = import_module(name)
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs {name}: {error}. Install it, or decompress the file.") from error
    try:
        raw = module.input_stream(path, "zstd") if name == "pyarrow" else module.open(path, "rb")
        with io.BufferedReader(raw) as file:
            yield file
    except (OSError, EOFError, zlib.error, getattr(module, "LZMAError", OSError)) as error:
        if getattr(error, "errno", None):  # of the file, not of its content
            raise
        raise ConfigError(f"{path}: damaged or cut off: {error}. Create or download it again.") from error


def _lines(file: BinaryIO, path: Path, largest: Largest) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line with its line break) of a UTF-8 file; a byte order mark is dropped."""
    for number, line in enumerate(iter(partial(file.readline, largest.row + 1), b""), 1):
        if len(line) > largest.row:
            largest.refuse_row(f"{path}:{number}", len(line))
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        yield number, _decode(line, f"{path}:{number}")


def _read_txt(path: Path, wanted: Wanted) -> Iterator[Row]:
    if wanted.sample_by == "document":
        with _opened(path) as file:
            yield from read_document(file, path, wanted.largest, wanted.divide)
        return
    with _opened(path) as file:
        if wanted.sample_by == "line":
            for number, line in _lines(file, path, wanted.largest):
                if text := line.rstrip("\r\n"):
                    yield Row(f"{path}:{number}", {"text": text}, number)
        else:
            yield from _paragraphs(_lines(file, path, wanted.largest), path, wanted.largest)


def _paragraphs(lines: Iterator[tuple[int, str]], path: Path, largest: Largest) -> Iterator[Row]:
    start, held, size = 0, list[str](), 0
    for number, line in chain(lines, [(0, "")]):
        if line.strip():
            start = start if held else number
            held.append(line)
            size += len(line)
            if size > largest.row:
                largest.refuse_row(f"{path}:{start}", size)
        elif held:
            yield Row(f"{path}:{start}", {"text": "".join(held).rstrip("\r\n")}, start)
            held, size = [], 0


def _read_jsonl(path: Path, wanted: Wanted) -> Iterator[Row]:
    with _opened(path) as file:
        for number, line in _lines(file, path, wanted.largest):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = json.loads(line, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                reason = str(error).partition(";")[0]  # then advice to programmers, if a number is too long
                raise ConfigError(
                    f"{where}: not one JSON object per line: {reason}. Correct or remove the line."
                ) from error
            except RepeatedKey as error:
                raise ConfigError(f"{where}: {error}. Correct or remove the line.") from error
            yield Row(where, _object(value, where), number)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: holds {kind_of_value(value)}, not an object with columns. Correct or remove it.")
    return value


def _read_json(path: Path, wanted: Wanted) -> Iterator[Row]:
    """Read an array of objects or, if the first character is not "[", one object per line."""
    return _read_json_array(path, wanted.largest) if _is_array(path) else _read_jsonl(path, wanted)


def _is_array(path: Path) -> bool:
    with _opened(path) as file:
        return file.read(CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_json_array(path: Path, largest: Largest) -> Iterator[Row]:
    """Yield the elements of a top-level array, with one chunk of the file in memory at a time."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    with _opened(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as file:
        text, line, index = _read_text(file, path, CHUNK_BYTES).lstrip(), 1, 0
        at = 1  # after the bracket
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if at < len(text) and text[at] == "]":
                _refuse_more(text[at + 1 :], file, path)
                return
            try:
                value, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                largest.refuse_row(f"{path}[{index}]", len(text) - at - CHUNK_BYTES)
                more = _read_text(file, path, max(CHUNK_BYTES, len(text)))  # doubling: linear even for a huge element
                if not more:
                    line += text.count("\n", 0, at)
                    raise ConfigError(
                        f"{path}: element {index} of the array, near line {line}: {error}. "
                        "The file is damaged or truncated: create it again."
                    ) from error
                line += text.count("\n", 0, at)
                text, at = text[at:] + more, 0
                continue
            except RepeatedKey as error:
                raise ConfigError(f"{path}[{index}]: {error}. Correct or remove the element.") from error
            where = f"{path}[{index}]"
            largest.refuse_row(where, end - at)
            yield Row(where, _object(value, where), index)
            at, index = end, index + 1


def _refuse_more(rest: str, file: Any, path: Path) -> None:
    """Raise ConfigError if text follows the array: it would not be read."""
    while not rest.strip():
        rest = _read_text(file, path, CHUNK_BYTES)
        if not rest:
            return
    raise ConfigError(
        f"{path}: has text after its array: {rest.strip()[:40]!r}. Write one array, or one object per line (.jsonl)."
    )


def _read_text(file: Any, path: Path, chars: int) -> str:
    try:
        return str(file.read(chars))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason}. Convert it (iconv -t UTF-8).") from error


def _read_csv(path: Path, wanted: Wanted) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # the default limit of 128 KiB is shorter than many documents
    with _opened(path) as file:
        lines = _lines_of_row(_lines(file, path, wanted.largest), path, wanted.largest, taken := [0])
        first = next(lines, "")
        delimiter = "\t" if kind_of(path).startswith(".tsv") else ";" if ";" in first and "," not in first else ","
        reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            refuse_repeated_columns(str(path), header)
            for cells in reader:
                taken[0] = 0
                where = f"{path}:{reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise ConfigError(
                        f"{where}: {len(cells)} cells, but the header has {len(header)}. Quote cells that contain "
                        f"{delimiter!r}."
                    )
                yield Row(where, dict(zip(header, cells, strict=True)), reader.line_num)
        except csv.Error as error:
            raise ConfigError(f"{path}:{reader.line_num}: not CSV: {error}. Correct or remove the line.") from error


def _lines_of_row(lines: Iterator[tuple[int, str]], path: Path, largest: Largest, taken: list[int]) -> Iterator[str]:
    """Yield the lines. taken: their size since a row was complete, as a quoted cell may have many."""
    for number, line in lines:
        taken[0] += len(line)
        if taken[0] > largest.row:
            largest.refuse_row(f"{path}:{number}", taken[0])
        yield line


_Reader = Callable[[Path, Wanted], Iterator[Row]]
_PLAIN: dict[str, _Reader] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": read_parquet,
}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}
"""Suffix of a compressed file -> the module that reads it. That of pyarrow notices if the file is cut off."""
_READERS = _PLAIN | {kind + last: _PLAIN[kind] for kind in _PLAIN if kind != ".parquet" for last in COMPRESSED}
KINDS = tuple(_READERS)
READABLE = f"{', '.join(_PLAIN)}, or compressed ({', '.join(COMPRESSED)}; not .parquet)"


def place(path: Path, number: int) -> str:
    """Return `Row.where` of the row of a file that has a number."""
    reader = _READERS[kind_of(path)]
    if reader is read_parquet:
        return f"{path} row {number}"
    if reader is _read_json and _is_array(path):
        return f"{path}[{number}]"
    return f"{path}:{number}" if number else str(path)


def kind_of(path: Path) -> str:
    """Return the suffix of a file in lower case; of a compressed file, the last two (".jsonl.gz")."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last in COMPRESSED else last
