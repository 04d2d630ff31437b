"""Filters, tests and methods that a chat template may call, which count what they make before they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from jinja2.filters import make_attrgetter

from .format_fields import price_percent
from .growing import check, keep
from .render_budget import ELEMENT, TURN, Budget, Overrun

FREE: Final = frozenset(
    (
        *("abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "map", "random"),
        *("reject", "rejectattr", "safe", "select", "selectattr"),
    )
)
"""Filters that neither copy a value nor look into it."""
_OF_TEXT: Final = frozenset(("capitalize", "lower", "string", "title", "trim", "upper"))
"""Filters that take a text, and by itself make one that is no longer."""
COMPARING: Final = frozenset(
    ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne")
)
"""Tests that look into a value."""
_LONGEST_NUMBER: Final = 4300
"""Characters of a text that is read as a number, and bytes of one."""
_LONGEST_PRECISION: Final = 400
_LONGEST_FOR_PAGES: Final = 1 << 14
"""Characters that filters for web pages take: their results may grow with the square."""
_SHORT: Final = 64
_MOST_COMPARED: Final = 1 << 32
"""Characters that a search may compare which takes time in proportion to both of its texts."""

Price = Callable[..., None]
"""A function of a budget and the arguments of a call. Raises Overrun."""


def priced_filter(name: str, function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """Return the filter `name` of the template engine with its price."""
    passed = getattr(function, "jinja_pass_arg", None) is not None  # the engine's own first argument
    price, kept = FILTERS.get(name, _arguments), keep(budget)

    @functools.wraps(function)
    def run_on_text(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is not str or args or kwargs:
            return run(value, *args, **kwargs)
        budget.left -= 2 * len(value)  # of the result too
        if budget.left < 0:
            budget.refill(2 * len(value))
        return function(value)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[passed], Iterator):
            args = (*args[:passed], list(args[passed]), *args[passed + 1 :])
        price(budget, *args[passed:], **kwargs)
        if price is _join and passed:
            _attributes(budget, args[0].environment, *args[1:], **kwargs)
        return kept(function(*args, **kwargs))

    return run_on_text if name in _OF_TEXT else run


def priced_test(function: Callable[..., Any], budget: Budget) -> Callable[..., Any]:
    """Return a test that compares values, with its price."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        _arguments(budget, *args)
        return function(*args)

    return run


def price_method(budget: Budget, method: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Count a call of a method of Python's own types; return the arguments to call it with. Raises Overrun."""
    own, size = method.__self__, 0
    if type(own) is str:
        size = len(own)
    for value in args:
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind is not int and value is not None:
            if isinstance(value, Iterator):
                return price_method(budget, method, tuple(list(one) if one is value else one for one in args), named)
            budget.weigh(value)
    budget.left -= size
    if budget.left < 0:
        budget.refill(size)
    if named:
        _arguments(budget, *named.values())
    price = METHODS.get(method.__name__)
    if price is not None:
        price(budget, own, *args, **named)
    return args


def price_arguments(budget: Budget, *args: Any, **named: Any) -> None:
    """Count what a call reads at most. Raises Overrun."""
    _arguments(budget, *args, **named)


def _arguments(budget: Budget, *args: Any, **named: Any) -> None:
    checked = check(budget)
    for value in args:
        checked(value)
    for value in named.values():
        checked(value)


def _pages(budget: Budget, *args: Any, **named: Any) -> None:
    budget.weigh([args, named])
    size = sum(len(value) for value in (*args, *named.values()) if isinstance(value, str))
    if size > _LONGEST_FOR_PAGES:
        raise Overrun(f"it gives a filter for web pages {size:,} characters; {_LONGEST_FOR_PAGES:,} are allowed")


def _center(budget: Budget, value: Any, width: Any = 80) -> None:
    _arguments(budget, value)
    _wide(budget, width)


def _wide(budget: Budget, width: Any) -> None:
    if isinstance(width, int):
        budget.spend(max(0, width))


def _indent(budget: Budget, text: Any, width: Any = 4, *more: Any, **named: Any) -> None:
    _arguments(budget, text)
    lines = len(text.splitlines()) + 1 if isinstance(text, str) else 0
    budget.spend(lines * (max(0, width) if isinstance(width, int) else len(str(width))))


def _join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    _arguments(budget, value, d)
    if isinstance(d, str) and hasattr(value, "__len__"):
        budget.spend(len(d) * len(value))


def _attributes(budget: Budget, environment: Any, value: Any, d: Any = "", attribute: Any = None) -> None:
    """Count what `join` reads of the elements."""
    if attribute is not None:
        read = make_attrgetter(environment, attribute)
        budget.weigh([read(element) for element in value])


def _replace(budget: Budget, text: Any, old: Any = "", new: Any = "", *more: Any, **named: Any) -> None:
    _arguments(budget, text, old, new)
    text, old, new = (value if isinstance(value, str | bytes) else str(value) for value in (text, old, new))
    budget.spend(text.count(old) * len(new))


def _format(budget: Budget, text: Any, *args: Any, **named: Any) -> None:
    if isinstance(text, str):
        price_percent(budget, text, named or args)


def _json(budget: Budget, value: Any, *args: Any, indent: Any = None, separators: Any = (), **named: Any) -> None:
    narrow = indent is None or (type(indent) is int and indent <= ELEMENT)
    if id(value) in budget.trees and narrow and not args and not separators:
        return
    wide = 0
    for one in (indent, *args, *(separators or ())):
        for part in one if isinstance(one, tuple | list) else (one,):
            wide += len(part) if isinstance(part, str) else max(0, part) if isinstance(part, int) else 0
    budget.weigh(value, wide)


def _batch(budget: Budget, value: Any, linecount: Any = 0, fill_with: Any = None) -> None:
    if isinstance(linecount, int):
        budget.spend(ELEMENT * max(0, linecount))


def _slice(budget: Budget, value: Any, slices: Any = 0, fill_with: Any = None) -> None:
    if isinstance(slices, int):
        budget.spend(TURN * max(0, slices))


def _round(budget: Budget, value: Any, precision: Any = 0, method: Any = None) -> None:
    if isinstance(precision, int) and abs(precision) > _LONGEST_PRECISION:
        raise Overrun(f"it rounds to {precision:,} digits; {_LONGEST_PRECISION} are allowed")


def _number(budget: Budget, value: Any, *more: Any, **named: Any) -> None:
    if isinstance(value, str | bytes) and len(value) > _LONGEST_NUMBER:
        raise Overrun(f"it reads {len(value):,} characters as a number; {_LONGEST_NUMBER:,} are allowed")


def _sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise Overrun("it sums what are not numbers")


def _list(budget: Budget, value: Any) -> None:
    budget.spend(TURN * len(value) if isinstance(value, str) else 0)


def _trim(budget: Budget, value: Any, chars: Any = None) -> None:
    _arguments(budget, value, chars)
    _each_with_each(value, chars)


def _each_with_each(value: Any, other: Any) -> None:
    texts = isinstance(value, str | bytes) and isinstance(other, str | bytes)
    if texts and len(other) > _SHORT and len(value) * len(other) > _MOST_COMPARED:
        raise Overrun(f"it searches {len(other):,} characters in {len(value):,}")


FILTERS: Final[Mapping[str, Price]] = {
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "int": _number,
    "join": _join,
    "list": _list,
    "pprint": _pages,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "striptags": _pages,
    "sum": _sum,
    "tojson": _json,
    "trim": _trim,
    "urlize": _pages,
    "wordwrap": _pages,
    "xmlattr": _pages,
}


def _filled(budget: Budget, own: Any, width: Any = 0, *more: Any) -> None:
    _wide(budget, width)


def _tabs(budget: Budget, own: Any, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        budget.spend(own.count("\t" if isinstance(own, str) else b"\t") * max(0, tabsize))


def _between(budget: Budget, own: Any, parts: Any = (), *more: Any) -> None:
    if isinstance(parts, Sequence):
        budget.spend(len(own) * len(parts))


def _translated(budget: Budget, own: Any, table: Any = None, *more: Any) -> None:
    longest = max((len(text) for text in getattr(table, "values", tuple)() if isinstance(text, str)), default=1)
    if isinstance(table, list | tuple):
        longest = max((len(text) for text in table if isinstance(text, str)), default=1)
    budget.spend(len(own) * longest)


def _split(budget: Budget, own: Any, sep: Any = None, *more: Any, **named: Any) -> None:
    found = own.count(sep) if sep and isinstance(sep, str | bytes) else len(own) // 2
    budget.spend(TURN * (found + 1))


def _split_back(budget: Budget, own: Any, sep: Any = None, *more: Any, **named: Any) -> None:
    _each_with_each(own, sep)
    _split(budget, own, sep)


def _searched(budget: Budget, own: Any, sought: Any = None, *more: Any) -> None:
    _each_with_each(own, sought)


def _bytes(budget: Budget, own: Any, length: Any = 1, *more: Any, **named: Any) -> None:
    _number(budget, length if isinstance(length, bytes) else b"")
    if isinstance(length, int) and length > _LONGEST_NUMBER:
        raise Overrun(f"it makes {length:,} bytes of a number; {_LONGEST_NUMBER:,} are allowed")


def _looked_up(budget: Budget, own: Any, sought: Any = None, *more: Any) -> None:
    if isinstance(own, list | tuple):
        budget.weigh(own)


METHODS: Final[Mapping[str, Price]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _filled),
    **dict.fromkeys(("count", "index"), _looked_up),
    **dict.fromkeys(("split", "splitlines"), _split),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"), _searched),
    **dict.fromkeys(("to_bytes", "from_bytes"), _bytes),
    "expandtabs": _tabs,
    "join": _between,
    "replace": _replace,
    "rsplit": _split_back,
    "translate": _translated,
}
