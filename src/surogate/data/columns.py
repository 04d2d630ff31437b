"""The columns of a dataset, and in how many rows each is filled.

Every decision about columns uses the union over all rows, so that it does not depend on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .parquet import without_nulls
from .row import Row

if TYPE_CHECKING:
    import pyarrow

_MOST_NAMES = 10
_LONGEST_NAME = 60


@dataclass
class Columns:
    """Counts over a dataset. filled: column -> number of rows in which it is filled, in order of appearance."""

    rows: int = 0
    filled: dict[str, int] = field(default_factory=dict)

    def holding_something(self) -> list[str]:
        return [name for name, count in self.filled.items() if count]

    def add_row(self, row: Row) -> None:
        self.rows += 1
        for name, value in row.values.items():
            self.filled[name] = self.filled.get(name, 0) + holds_something(value)

    def add_table(self, table: pyarrow.Table | pyarrow.RecordBatch) -> None:
        self.rows += table.num_rows
        for name in table.schema.names:
            self.filled[name] = self.filled.get(name, 0) + _count(table.column(name))


def holds_something(value: Any) -> bool:
    """Return whether a cell is filled: not null, an empty text, an empty list, or an object of only such values."""
    if isinstance(value, Mapping):
        return any(map(holds_something, value.values()))
    return not (value is None or (isinstance(value, str | list | tuple) and not value))


def unused_columns(
    columns: Columns, used: Sequence[str], keys: Mapping[str, Any], others: Mapping[str, str] | None = None
) -> str | None:
    """Return one line that names the filled columns outside `used`, the most frequent first; None if there are none.

    keys: {config key: column} that `type: auto` would set; the line names the key that reads a column.
    others: {column: what of another dataset type reads it}.
    """
    left = sorted((-count, name) for name, count in columns.filled.items() if count and name not in used)
    if not left:
        return None
    readers = {column: key for key, column in keys.items() if isinstance(column, str)}
    parts = []
    for count, name in left[:_MOST_NAMES]:
        elsewhere = f"; {others[name]}" if others and name in others else ""
        remedy = f"; {readers[name]}: {name} reads it" if name in readers else elsewhere
        parts.append(f"{_shown(name)} (in {-count:,} {'row' if count == -1 else 'rows'}{remedy})")
    more = f" and {len(left) - _MOST_NAMES:,} more" if len(left) > _MOST_NAMES else ""
    return f"columns not used: {', '.join(parts)}{more}"


def _shown(name: str) -> str:
    """Return a column's name on one line: control characters escaped, long names cut."""
    text = name if name and name.isprintable() else repr(name)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def _count(column: Any) -> int:
    """Count the filled cells of an Arrow column; only nested and dictionary columns become Python objects."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.sum(pc.not_equal(column, ""), min_count=0).as_py()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pc.sum(pc.greater(pc.list_value_length(column), 0), min_count=0).as_py()
    if pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
        return sum(holds_something(without_nulls(cell)) for cell in column.to_pylist())
    return len(column) - int(column.null_count)
