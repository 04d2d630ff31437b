"""The most documents in a row. Not in `pack.py`, so that planning does not import numpy."""

from __future__ import annotations

MOST_PIECES = 2_048
"""Attention keeps counters for each document as if it were as long as the row, so a bound that grows with the row costs
its square: 158 GiB at 524,288 tokens with a document for each 8 of them, 4 GiB with this one."""


def documents_in_row(sequence_len: int, sample_packing: bool, group: int = 1) -> int:
    """Return the most documents in a row, of which `group` stay together. The padding at its end counts as one."""
    group = max(1, group)
    return (max(1, max_pieces(sequence_len) // group) if sample_packing else 1) * group + 1


def max_pieces(sequence_len: int) -> int:
    """Return the most pieces in a row. It bounds the length of cu_seqlens; rows of shorter pieces stay partly empty."""
    return min(max(1, sequence_len // 8), MOST_PIECES)
