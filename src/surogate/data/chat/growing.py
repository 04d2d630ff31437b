"""Operators, loops and output of a chat template, which count what they make before they make it.

Each function returns the operation for a budget: compiled templates call it as a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

from .format_fields import price_percent
from .render_budget import ELEMENT, TURN, Budget, Overrun

_LONGEST_INTEGER: Final = 1 << 14
"""Bits. Python writes no longer integers as text."""
_FEW: Final = 256
"""Turns of a loop, or pieces of text, that are counted at once."""


def add(budget: Budget) -> Callable[[Any, Any], Any]:
    """Return `left + right`."""

    def run(left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str:
            size = len(left) + len(right)
            budget.left -= size
            if budget.left < 0:
                budget.refill(size)
        elif isinstance(left, int) and isinstance(right, int):
            _refuse_long(max(left.bit_length(), right.bit_length()) + 1)
        elif isinstance(left, str | bytes | list | tuple):
            budget.spend(length(left) + length(right))
        return left + right

    return run


def multiply(budget: Budget) -> Callable[[Any, Any], Any]:
    """Return `left * right`."""

    def run(left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _refuse_long(left.bit_length() + right.bit_length())
        elif isinstance(left, int):
            budget.spend(length(right) * max(0, left))
        elif isinstance(right, int):
            budget.spend(length(left) * max(0, right))
        return left * right

    return run


def power(budget: Budget) -> Callable[[Any, Any], Any]:
    """Return `left ** right`."""

    def run(left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _refuse_long(left.bit_length() * abs(right))
        return left**right

    return run


def remainder(budget: Budget) -> Callable[[Any, Any], Any]:
    """Return `left % right`: of numbers, or a text with its fields filled in."""

    def run(left: Any, right: Any) -> Any:
        if isinstance(left, str | bytes):
            price_percent(budget, left, right)
        return left % right

    return run


def concatenate(budget: Budget) -> Callable[[Iterable[Any]], str]:
    """Return the operands of `~` as one text."""

    def run(parts: Iterable[Any]) -> str:
        texts = [part if type(part) is str else str(checked(part)) for part in parts]
        budget.spend(sum(map(len, texts)))
        return "".join(texts)

    checked = check(budget)
    return run


def check(budget: Budget) -> Callable[[Any], Any]:
    """Return a value that is printed, compared, or made a key next."""

    def run(value: Any) -> Any:
        kind = type(value)
        if kind is str:
            budget.left -= len(value)
            if budget.left < 0:
                budget.refill(len(value))
        elif kind is not bool and kind is not int and value is not None:
            budget.weigh(value)
        return value

    return run


def keep(budget: Budget) -> Callable[[Any], Any]:
    """Return a value that was just made from another, and is hardly larger."""

    def run(value: Any) -> Any:
        if type(value) is str:
            budget.left -= len(value)
            if budget.left < 0:
                budget.refill(len(value))
        elif isinstance(value, str | bytes | list | tuple):
            budget.spend(length(value))
        return value

    return run


def turns(budget: Budget) -> Callable[[Any], Any]:
    """Return what a loop runs over, with its turns counted."""

    def run(iterable: Any) -> Any:
        kind = type(iterable)
        if (kind is list or kind is dict or kind is tuple) and len(iterable) <= _FEW:
            budget.spend(TURN * len(iterable))
            return iterable
        return _Turns(iterable, budget)

    return run


class _Turns:
    def __init__(self, iterable: Any, budget: Budget) -> None:
        self._iterable, self._budget = iterable, budget

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        budget = self._budget
        for element in self._iterable:
            budget.left -= TURN
            if budget.left < 0:
                budget.refill(TURN)
            yield element


def write(budget: Budget) -> Callable[[Iterable[str]], str]:
    """Return the pieces of a rendering, or of a macro, as one text."""

    def run(pieces: Iterable[str]) -> str:
        rest = iter(pieces)
        held = [*islice(rest, _FEW)]
        size = sum(map(len, held)) + ELEMENT * len(held)
        budget.left -= size
        if budget.left < 0:
            budget.refill(size)
        while len(held) % _FEW == 0 and (some := [*islice(rest, _FEW)]):
            more = sum(map(len, some)) + ELEMENT * len(some)
            size += more
            budget.spend(more)
            budget.fits(size)
            held += some
        return "".join(held)

    return run


def length(value: Any) -> int:
    """Return what a text or a list costs by itself; 0 for what has no length."""
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, list | tuple) else 0


def _refuse_long(bits: int) -> None:
    if bits > _LONGEST_INTEGER:
        raise Overrun(f"it makes an integer of more than {_LONGEST_INTEGER:,} bits")
