"""Limits of rendering one conversation: processor time, work, and the size of a value.

Work is counted in characters: a text costs its length, an element of a list 8, a turn of a loop or a call 64. The clock
is read whenever another million is spent. So no operation may be long whose size is not counted before it runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from threading import Event
from typing import Any, Final

SECONDS: Final = 10
"""Processor time of one rendering."""
LARGEST: Final = 1 << 24
"""Characters of a value or of the rendered text, or an eighth of that in elements, beside `_PER_CHARACTER`."""
MOST_WORK: Final = 1 << 28
"""Work of one rendering, beside `_PER_CHARACTER`."""
_PER_CHARACTER: Final = (8, 1024)
"""Added to `LARGEST` and `MOST_WORK` for each character of the messages and tools: long rows need more."""
TURN: Final = 64
ELEMENT: Final = 8
_SLICE: Final = 1 << 20


class Overrun(Exception):
    """A rendering costs more than it may. The message says what, and what is allowed."""


class Budget:
    """Work that is left for the rendering that began with `start`. One thread renders at a time.

    trees: ids of lists and objects of the row, in which nothing is held twice.
    left: work until the limits are compared again. Who spends often subtracts from it in place, and calls `refill` if
    it is below 0.
    """

    __slots__ = ("_ended", "_given", "_largest", "_most", "_spent", "_started", "left", "trees")

    def __init__(self) -> None:
        self.start(None)

    def start(self, given: Any, ended: Event | None = None) -> None:
        """Begin a rendering of `given`, the messages and tools. ended: set by another thread to end it."""
        self._given, self._largest, self._most = given, LARGEST, MOST_WORK
        self._spent, self.left = 0, _SLICE
        self._ended = ended
        self.trees: set[int] = set()
        self._started: float | None = None  # the first million takes no time, and reading the clock does

    def spend(self, size: int) -> None:
        """Count an operation that reads or makes a value of this size. Raises Overrun."""
        self.left -= size
        if self.left < 0:
            self.refill(size)

    def refill(self, size: int) -> None:
        """Compare what is spent with the limits. size: of the last operation, already counted. Raises Overrun."""
        self._spent += _SLICE - self.left
        self.left = _SLICE
        if self._ended is not None and self._ended.is_set():
            raise Overrun("it was interrupted")
        self.fits(size)
        if self._spent > self._most:
            self._widen()
            if self._spent > self._most:
                raise Overrun("it repeats texts, loops or calls without end")
        if self._started is None:
            self._started = time.thread_time()
        elif time.thread_time() - self._started > SECONDS:
            raise Overrun(f"it takes more than {SECONDS} seconds")

    def fits(self, size: int) -> None:
        """Raise Overrun if a value of this size is too large."""
        if size > self._largest:
            self._widen()
            if size > self._largest:
                raise Overrun(f"it makes a text or list of more than {self._largest:,} characters")

    def weigh(self, value: Any, indent: int = 0) -> None:
        """Count the size of a value at any depth. Raises Overrun if it is too large."""
        size = measure(value, self._largest, indent)
        if size > self._largest:
            self._widen()
            size = measure(value, self._largest, indent)
            self.fits(size)
        self.spend(size)

    def _widen(self) -> None:
        """Set the limits that these messages need. Not done at the start, as few rows need more."""
        if self._given is not None:
            given, self._given = measure(self._given, 1 << 40), None
            self._largest += _PER_CHARACTER[0] * given
            self._most += _PER_CHARACTER[1] * given


def measure(value: Any, at_most: int, indent: int = 0) -> int:
    """Return the characters and elements of a value, each as often as it is reached; past `at_most`, stop counting.

    A list that holds a list twice, which holds another twice, and so on, is small in memory and large when it is
    printed or compared. indent: characters before each element, per level.
    """
    total, level, todo = 0, 0, [value]
    while todo and total <= at_most:
        level += 1
        below: list[Any] = []
        for one in todo:
            kind = type(one)
            if kind is str:
                total += len(one)
            elif kind is dict:
                total += len(one) * (2 * ELEMENT + indent * level)
                below += one
                below += one.values()
            elif kind is list or kind is tuple:
                total += len(one) * (ELEMENT + indent * level)
                below += one
            else:
                total += _other(one, below)
            if total > at_most:
                break
        todo = below
    return total


def _other(one: Any, below: list[Any]) -> int:
    """Return the size of a value of a rarer type, and add what it holds to `below`."""
    if one is None or isinstance(one, float):
        return 3 * ELEMENT
    if isinstance(one, int):
        return 3 * ELEMENT + one.bit_length() // 3
    if isinstance(one, str | bytes):
        return len(one)
    held = one
    with suppress(AttributeError):  # what the namespace of a template prints
        held = object.__getattribute__(one, "_Namespace__attrs")
    if isinstance(held, Collection) and not isinstance(held, range):
        below += held.items() if isinstance(held, dict) else held
        return len(held) * ELEMENT
    return TURN
