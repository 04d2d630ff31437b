"""NVFP4: E2M1 elements, one E4M3 scale for every 16 of a row, and one fp32 factor for the matrix."""

from __future__ import annotations

from typing import Final

BLOCK: Final = 16
"""Elements of a row that share a scale. Square blocks have as many rows too."""

LEVELS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1 by code. Bit 3 of a code is the sign."""

LARGEST: Final = 6.0
SCALE_LARGEST: Final = 448.0
"""Largest numbers of E2M1 and E4M3."""

ATOM_ROWS: Final = 128
ATOM_SCALES: Final = 4
"""Rows, and scales of a row, that lie together in 512 bytes."""

SIGNS: Final = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs by which the Hadamard transform multiplies 16 elements first."""


def scale_range(four_over_six: bool) -> float:
    """Return E: the largest magnitude of a matrix has the scale E and the code of 6.

    With four_over_six, scales up to 1.5 E must be finite.
    """
    return 256.0 if four_over_six else SCALE_LARGEST


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a matrix: whole atoms. Scales beyond the matrix are 0."""
    return -(-rows // ATOM_ROWS) * ATOM_ROWS, -(-columns // (BLOCK * ATOM_SCALES)) * ATOM_SCALES


def scale_offset(row: int, block: int, columns: int) -> int:
    """Return the byte at which the scale of a row's block lies: atoms row by row, and in an atom the "128x4" layout.

    The 16 bytes of lane `row % 32` are four scales of each of the rows `lane`, `lane + 32`, `lane + 64`, `lane + 96`.
    """
    atom = row // ATOM_ROWS * (scale_shape(1, columns)[1] // ATOM_SCALES) + block // ATOM_SCALES
    return atom * ATOM_ROWS * ATOM_SCALES + row % 32 * 16 + row % ATOM_ROWS // 32 * 4 + block % ATOM_SCALES
