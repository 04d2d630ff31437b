"""A picture of differences in text: how many tokens are off by how much."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, isfinite, log10
from typing import Final

_WIDTH: Final = 32
"""Characters of the longest bar."""
_LEAST: Final = -9
"""Differences of at most 10 to this power are one row."""


def drawn(gaps: Sequence[float], bound: float) -> tuple[str, ...]:
    """Return a row for each power of ten, with its tokens as a bar; one row is marked as that of the bound."""
    powers = [_power(gap) for gap in gaps]
    finite = [power for power in powers if isfinite(power)]
    marked = _power(bound)
    rows = [*range(int(min([*finite, marked])), int(max([*finite, marked])) + 1)]
    counts = [(f"to 1e{power:+03d}", powers.count(power), power == marked) for power in rows]
    if len(finite) < len(powers):
        counts.append(("no number", len(powers) - len(finite), False))
    most = max(count for _, count, _ in counts)
    return tuple(
        f"{name:<9}  {count:>7,} {'#' * ceil(_WIDTH * count / most)}{'  <- the bound is here' if here else ''}".rstrip()
        for name, count, here in counts
    )


def _power(gap: float) -> float:
    """Return the power of ten that a difference is at most."""
    if not isfinite(gap):
        return inf
    return max(_LEAST, ceil(log10(gap))) if gap > 0 else _LEAST
