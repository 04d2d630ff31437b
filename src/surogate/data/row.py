"""A row of a file, what is asked of it, and how large it may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surogate_core.api.json_object import first_repeated
from surogate_core.errors import ConfigError

from ..config.dataset_entry import MAX_DOCUMENT_BYTES, MAX_ROW_BYTES
from .divide import Divide, whole

HELD_BYTES = 1 << 31


@dataclass(frozen=True)
class Largest:
    """Bytes, after decompression, that a row and a .txt file that is one document may have, by keys of the entry.

    held: bytes of such a file that may be in memory together.
    """

    row: int = MAX_ROW_BYTES
    document: int = MAX_DOCUMENT_BYTES
    held: int = HELD_BYTES

    def refuse_row(self, where: str, size: int) -> None:
        """Raise ConfigError if a row is larger."""
        if size > self.row:
            raise ConfigError(
                f"{where}: the row has more than {self.row:,} bytes (max_row_bytes). Split or remove it, or raise "
                "max_row_bytes of the entry: the row is held in memory several times."
            )


@dataclass(frozen=True)
class Row:
    """A row of a dataset, or a part of one.

    where: its place for messages ("train.jsonl:17"), `Source.place` of `file` and `number`. first, last: whether a part
    is the first and the last of its row.
    """

    where: str
    values: Mapping[str, Any]
    number: int
    file: int = 0
    first: bool = True
    last: bool = True

    @property
    def is_part(self) -> bool:
        return not (self.first and self.last)


@dataclass(frozen=True)
class Wanted:
    """Columns to read from a file. columns: empty for all. optional: columns that a row may lack.

    divide: how a .txt file that is one document becomes rows that are its parts.
    """

    columns: Sequence[str] = ()
    optional: Sequence[str] = ()
    sample_by: str = "document"
    largest: Largest = field(default_factory=Largest)
    divide: Divide = whole

    def refuse_missing(self, where: str, available: Sequence[str]) -> None:
        for column in self.columns:
            if column not in available and column not in self.optional:
                raise missing_column(where, column, available)


def with_columns(row: Row, wanted: Wanted) -> Row:
    """Return the row with None in optional columns that it lacks. Raises ConfigError if it lacks another."""
    absent = [column for column in wanted.columns if column not in row.values]
    if not absent:
        return row
    wanted.refuse_missing(row.where, list(row.values))
    return replace(row, values={**row.values, **dict.fromkeys(absent)})


def missing_column(where: str, column: str, available: Sequence[str]) -> ConfigError:
    names = ", ".join(str(name) for name in available) or "none"
    return ConfigError(
        f"{where}: no column {column!r}. Available: {names}. Set the entry's key for it (such as text_field or "
        "messages_field) to one of them."
    )


def refuse_repeated_columns(where: str, names: Sequence[str]) -> None:
    """Raise ConfigError if a table has two columns of one name: only one of them could be read."""
    repeated = first_repeated(names)
    if repeated is not None:
        raise ConfigError(f"{where}: column {repeated!r} appears twice. Rename or remove one of them.")
