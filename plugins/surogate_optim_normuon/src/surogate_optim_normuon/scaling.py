"""The size of an update. No torch here."""

from __future__ import annotations

from math import sqrt


def factor(rows: int, columns: int, lr_scale: str) -> tuple[float, bool]:
    """Return (factor, divided): what the update of a matrix is multiplied by, apart from the learning rate.

    If `divided`, it is also divided by the norm of the orthogonalized matrix.

    match_adamw  0.2 sqrt(max(rows, columns)): elements of rms 0.2, as AdamW's, so its learning rate fits
    spectral     sqrt(max(1, rows / columns)): for learning rates near 0.02
    paper        0.2 sqrt(rows columns) / norm: elements of rms 0.2 whatever the norm of the orthogonalized matrix
    """
    if lr_scale == "match_adamw":
        return 0.2 * sqrt(max(rows, columns)), False
    if lr_scale == "spectral":
        return sqrt(max(1.0, rows / columns)), False
    return 0.2 * sqrt(rows * columns), True
