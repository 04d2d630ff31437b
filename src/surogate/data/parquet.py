"""Reader of parquet files, which have a schema and columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surogate_core.errors import ConfigError

from .row import Largest, Row, Wanted, refuse_repeated_columns

PARQUET_ROWS = 1024
PARQUET_BYTES = 1 << 26
"""Rows that are read together have about so many bytes, unless one has more."""


def read_parquet(path: Path, wanted: Wanted) -> Iterator[Row]:
    number = 0
    with _naming_parquet(path):
        for batch in _batches(path, wanted):
            for values in _cells(batch, f"{path} rows {number} to {number + batch.num_rows - 1}"):
                yield Row(f"{path} row {number}", {name: without_nulls(cell) for name, cell in values.items()}, number)
                number += 1


def _cells(batch: Any, where: str) -> Any:
    """Return a record batch as a list of dicts. A map, which Spark writes for an object, is a dict too."""
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except (KeyError, ValueError) as error:  # inside of a struct the second
        if isinstance(error, ValueError) and "duplicate" not in str(error):
            raise
        raise ConfigError(f"{where}: a map has a key twice. Correct or remove such rows.") from error


def read_parquet_tables(path: Path, largest: Largest) -> Iterator[Any]:
    """Yield all columns of a parquet file as Arrow record batches, without creating a Python object per cell.

    Raises ConfigError if the file is damaged, has two columns of one name, or pyarrow is not installed.
    """
    with _naming_parquet(path):
        yield from _batches(path, Wanted(largest=largest))


def _batches(path: Path, wanted: Wanted) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        available = file.schema_arrow.names
        refuse_repeated_columns(str(path), available)
        wanted.refuse_missing(str(path), available)
        columns = [name for name in wanted.columns if name in available]
        number = 0
        for group in range(file.metadata.num_row_groups):
            rows = _rows_at_once(file.metadata.row_group(group))
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], columns=columns or None):
                if batch.nbytes > wanted.largest.row:
                    for index in range(batch.num_rows):
                        wanted.largest.refuse_row(f"{path} row {number + index}", batch.slice(index, 1).nbytes)
                number += batch.num_rows
                yield batch


def _rows_at_once(group: Any) -> int:
    """Return how many rows of a row group are read together: fewer of large ones."""
    size = max(1, group.total_byte_size // max(1, group.num_rows))
    return max(1, min(PARQUET_ROWS, PARQUET_BYTES // size))


@contextmanager
def _naming_parquet(path: Path) -> Iterator[None]:
    """Turn errors of pyarrow into ConfigError. Some, as for invalid UTF-8, are raised only when a cell is read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow: {error}. Install it (pip install pyarrow)."
        ) from error
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: not parquet, or damaged: {error}. Create or download it again.") from error


def without_nulls(cell: Any) -> Any:
    """Drop the null keys of a table's cell, at any depth; a cell that is null itself is returned unchanged.

    In a table, a struct has the keys of all rows, and null for those that the row does not have.
    """
    if isinstance(cell, dict):
        return {key: without_nulls(value) for key, value in cell.items() if value is not None}
    return [without_nulls(value) for value in cell] if isinstance(cell, list) else cell
