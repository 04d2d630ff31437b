"""Alignment of buffers."""

from __future__ import annotations

from ..program.value import ALIGNMENT

__all__ = ["ALIGNMENT", "align"]


def align(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
