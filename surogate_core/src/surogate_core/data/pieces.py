"""The most documents in a row. Not in `pack.py`, so that planning does not import numpy."""

from __future__ import annotations


def max_pieces(sequence_len: int) -> int:
    """Return the most pieces in a row. It bounds the length of cu_seqlens; rows of shorter pieces stay partly empty."""
    return max(1, sequence_len // 8)
