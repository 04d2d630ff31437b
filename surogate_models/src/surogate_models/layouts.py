"""Orders in which checkpoints hold the elements of weights. They need no torch: tensors bring their own methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surogate_core.api import ProgramError


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
