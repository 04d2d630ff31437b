"""Prices of formats with fields, as in "%5d" or "{:>5}"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, Final

from .render_budget import Budget, Overrun

_LONGEST: Final = 1 << 14
"""Characters of a format."""
_NUMBER: Final = 400
"""Characters that the largest number has, before a width or precision is asked for."""
_PERCENT = re.compile(r"%(?:\([^()%]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
_DIGITS = re.compile(r"\d+")


def price_percent(budget: Budget, text: str | bytes, values: Any) -> None:
    """Count `text % values`. Raises Overrun."""
    _refuse_long(text)
    fields = _PERCENT.findall(text if isinstance(text, str) else text.decode("latin-1"))
    sizes = [size for field in fields for size in field]
    given = values if isinstance(values, tuple) else (values,)
    if "*" in sizes:  # the next value is the size
        sizes += [str(value) for value in given if isinstance(value, int) and value.bit_length() < 64]
    _price(budget, len(fields), sizes, values if isinstance(values, Mapping) else given)


def price_format(budget: Budget, text: str, values: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Count `text.format(*values, **named)`. Raises Overrun, and ValueError as that does."""
    _refuse_long(text)
    fields = [(name, asked or "") for _, name, asked, _ in Formatter().parse(text) if name is not None]
    if any("{" in asked for _, asked in fields):
        raise Overrun("it computes the width of a field of a format")
    sizes = [size for _, asked in fields for size in _DIGITS.findall(asked)]
    _price(budget, len(fields), sizes, {"": [*values], **named})


def _price(budget: Budget, fields: int, sizes: Sequence[str], values: Any) -> None:
    """sizes: the widths and precisions that are asked for. Values by name may be written in every field."""
    longest = max((abs(int(size[:20])) for size in sizes if size.lstrip("-").isdigit()), default=0)
    budget.spend(fields * (longest + _NUMBER))
    for _ in range(fields if isinstance(values, Mapping) else 1):
        budget.weigh(values)


def _refuse_long(text: str | bytes) -> None:
    if len(text) > _LONGEST:
        raise Overrun(f"it has a format of {len(text):,} characters; {_LONGEST:,} are allowed")
