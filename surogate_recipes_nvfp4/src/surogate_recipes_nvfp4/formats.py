"""NVFP4: E2M1 numbers, an E4M3 scale for each block of 16, and a magnitude for the whole matrix.

A *form* of a matrix [R, C] is three values:

    codes   e2m1 [R, C], two to a byte
    scales  ue4m3 [R to a multiple of 128, C / 16 to a multiple of 4]: the scale of each block, in the order in which
            tensor cores read them (`scale_order`); padding is 0
    amax    fp32 [2]: the largest magnitude of the matrix, NaN if it is not finite, and the largest scale

Its elements are code * scale * amax[0] / (6 * amax[1]).
"""

from __future__ import annotations

from typing import Final

from surogate_core.api import NumericsColumn

BLOCK: Final = 16
"""Adjacent elements of a row that share a scale."""

LARGEST: Final = 6.0
LARGEST_SCALE: Final = 448.0
LARGEST_SCALE_4_6: Final = 256.0
"""With blocks that may be scaled to 4: a scale that is half as large again must be finite, and 384 is exact."""

ATOM_ROWS: Final = 128
ATOM_COLUMNS: Final = 4
"""Scales are stored in atoms of 128 rows and 4 columns, 512 bytes, row by row of atoms."""


COLUMNS: Final = (
    NumericsColumn("amax", "magnitude", "largest magnitude"),
    NumericsColumn("error", "share", "root mean square of what rounding changes, over that of the tensor"),
    NumericsColumn("lost", "share", "elements other than 0 that are rounded to 0"),
)
"""Figures of a numerics report."""

OF_A_ROW: Final = 5
"""Numbers of a row that they are made of: its largest magnitude, NaN if an element is not finite; the sums of the
squares of what rounding changes and of its elements; elements other than 0, and how many of these are rounded to 0."""


STORED_LAYOUT: Final = "e2m1, e4m3 for 16"
"""The layout of frozen weights that products read as they are stored: codes uint8 [R, C / 2], scales e4m3 [R, C / 16],
row by row, and a factor fp32 for each of the matrices in a fused weight. Elements are the products of the three."""


def largest_scale(four_over_six: bool) -> float:
    """Return the scale of the block with the largest magnitude."""
    return LARGEST_SCALE_4_6 if four_over_six else LARGEST_SCALE


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a matrix, with their padding."""
    return _up(rows, ATOM_ROWS), _up(columns // BLOCK, ATOM_COLUMNS)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
