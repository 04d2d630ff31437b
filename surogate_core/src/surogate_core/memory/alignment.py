"""Alignment of buffers."""

from __future__ import annotations

ALIGNMENT = 256
"""Every buffer begins at a multiple of this many bytes, as memory from cudaMalloc does. Enough for any vector load."""


def align(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
