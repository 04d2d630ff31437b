"""How many documents a row can hold. Apart from `pack.py`, so that planning a run needs no numpy."""

from __future__ import annotations


def max_pieces(sequence_len: int) -> int:
    """Most pieces a row holds. It bounds the length of cu_seqlens; rows of shorter pieces stay partly empty."""
    return max(1, sequence_len // 8)
