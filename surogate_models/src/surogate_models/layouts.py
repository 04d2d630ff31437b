"""Orders in which checkpoints hold the elements of weights. They need no torch: tensors bring their own methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from surogate_core.api import Layout, ProgramError


@dataclass(frozen=True)
class Transposed:
    """The last two dimensions are exchanged: [.., K, N] in the checkpoint, [.., N, K] in the param."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if len(stored) < 2:
            raise ProgramError("a tensor needs two dimensions to be transposed")
        return (*stored[:-2], stored[-1], stored[-2])

    def load(self, stored: Any) -> Any:
        return stored.transpose(-1, -2)

    def save(self, rows: Any) -> Any:
        return rows.transpose(-1, -2)

    def __str__(self) -> str:
        return "transposed"


@dataclass(frozen=True)
class Interleaved:
    """Rows of several matrices alternate: `rows` of the first, `rows` of the second, and so on, again and again.

    The param has the matrices one above another. Gate and up row by row are `Interleaved(2)`; q, k and v head by head,
    of as many heads each, are `Interleaved(3, rows=head_dim)`.
    """

    matrices: int
    rows: int = 1

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if not stored or stored[0] % (self.matrices * self.rows):
            raise ProgramError(f"its rows must be a multiple of {self.matrices} x {self.rows} to be {self}")
        return stored

    def load(self, stored: Any) -> Any:
        return self._exchanged(stored, -1, self.matrices)

    def save(self, rows: Any) -> Any:
        return self._exchanged(rows, self.matrices, -1)

    def _exchanged(self, tensor: Any, first: int, second: int) -> Any:
        grouped = tensor.reshape(first, second, self.rows, *tensor.shape[1:])
        return grouped.transpose(0, 1).reshape(tensor.shape)

    def __str__(self) -> str:
        return f"interleaved ({self.matrices} matrices, {self.rows} rows in turn)"


@dataclass(frozen=True)
class Stacked:
    """Matrices one after another in a tensor of three dimensions, as those of experts. The param has them one above
    another: `rows` of each.

    A checkpoint's [E, N, K] is `Stacked(N)`, rows [E N, K]. [E, K, N] is `Stacked(N, Transposed())`. of: the layout of
    each matrix; None: it is stored as the param has it.
    """

    rows: int
    of: Layout | None = None
    leading: ClassVar[bool] = True

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if len(stored) != 3:
            raise ProgramError(f"must have three dimensions to be {self}")
        matrix = stored[1:] if self.of is None else self.of.shape(stored[1:])
        if len(matrix) != 2 or matrix[0] != self.rows:
            raise ProgramError(f"has matrices of {list(matrix)}, and {self} has {self.rows} rows in each")
        return stored[0] * self.rows, matrix[1]

    def load(self, stored: Any) -> Any:
        if self.of is None:
            return stored.flatten(0, 1)
        found = stored.new_empty(self.shape(tuple(stored.shape)))
        for rows, matrix in zip(found.split(self.rows), stored, strict=True):
            rows.copy_(self.of.load(matrix))
        return found

    def save(self, rows: Any) -> Any:
        if self.of is None:
            return rows.unflatten(0, (-1, self.rows))
        found = [self.of.save(part) for part in rows.split(self.rows)]
        stored = rows.new_empty((len(found), *found[0].shape))
        for matrix, part in zip(stored, found, strict=True):
            matrix.copy_(part)
        return stored

    def __str__(self) -> str:
        return "a stack of matrices" + ("" if self.of is None else f", each {self.of}")
