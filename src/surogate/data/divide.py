"""Ways to divide a text that is read bit by bit into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

CHUNK_CHARS = 1 << 20

More = Callable[[int], str]
"""(about how many characters) -> the next of a text; "" at its end."""
Divide = Callable[[More], Iterator[str]]
"""Yields the parts of a text. There is one at least; if there are more, none is empty."""


def whole(more: More) -> Iterator[str]:
    """Yield a text as one part."""
    yield "".join(anywhere(more))


def anywhere(more: More) -> Iterator[str]:
    """Yield a text in parts that mean nothing, with little memory."""
    yield more(CHUNK_CHARS)
    yield from iter(partial(more, CHUNK_CHARS), "")


def reading(text: str) -> More:
    """Return what reads a text that is in memory."""
    at = 0

    def more(chars: int) -> str:
        nonlocal at
        at += chars
        return text[at - chars : at]

    return more
