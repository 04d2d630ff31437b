"""Rows that a script has given, as a file in the cache, `<sha256 of its bytes>.rows`: a JSON object a line.

A config names the file, so that a run on rows in memory is planned, saved and resumed as any other. `given_rows` writes
it. Messages name a row by its number in what was given: "datasets.0 row 17".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from surogate_core.errors import ConfigError

from .columns import Columns
from .divide import Divide, whole
from .row import Largest, Row, Wanted, with_columns

SUFFIX = ".rows"


@dataclass(frozen=True)
class RowsSource:
    """The rows of such a file. where: what they were given as, such as "datasets.0". samples: the first N only."""

    path: Path
    where: str
    samples: int | None
    largest: Largest

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ConfigError(
                f"{self.where}: path: {self.path}: the rows that a script gave are no longer in the cache. Run the "
                "script again, which writes them."
            )

    def content_hash(self) -> str:
        """Return a hash of the rows. Raises ConfigError if the file is damaged."""
        return self._content_hash

    @cached_property
    def _content_hash(self) -> str:
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.path.stem:
            raise ConfigError(
                f"{self.where}: path: {self.path}: is damaged: its bytes are not those that its name is a hash of. "
                "Remove it and run the script again."
            )
        return hashlib.sha256(f"rows {digest} {self.samples}".encode()).hexdigest()

    def rows(
        self, columns: Sequence[str] | None, optional: Sequence[str] = (), divide: Divide = whole
    ) -> Iterator[Row]:
        wanted = Wanted(columns or (), optional)
        with self.path.open("rb") as file:
            for number, line in takewhile(self._within, enumerate(file)):
                where = self.place(0, number)
                self.largest.refuse_row(where, len(line))
                yield with_columns(Row(where, json.loads(line), number), wanted)

    def _within(self, numbered: tuple[int, bytes]) -> bool:
        return self.samples is None or numbered[0] < self.samples

    def place(self, file: int, number: int) -> str:
        return f"{self.where} row {number}"

    def count_columns(self) -> Columns:
        columns = Columns()
        for row in self.rows(None):
            columns.add_row(row)
        return columns

    def left_out(self) -> str | None:
        return None
