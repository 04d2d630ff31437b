"""Values of plugins' options, read as core reads its own: flags and choices by the same words."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .errors import Problem, fold, keys_of, shown
from .values import parse_flag, parse_int


def as_core_reads(
    model: type[BaseModel], given: Mapping[str, Any], within: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values with flags, counts and choices translated, and a problem for each that cannot be.

    A field `bool` takes what core's flags take; `bool | int` that or a whole number; a `Literal` its words in any case,
    with `-` or `_`. Everything else is left to the model.
    """
    values, problems = dict(given), list[Problem]()
    for key, info in zip(keys_of(model), model.model_fields.values(), strict=True):
        try:
            if key in given:
                values[key] = _read(info.annotation, given[key])
        except ValueError as error:
            problems.append(Problem(within + key, f"{error} (got {shown(given[key])})"))
    return values, problems


def _read(annotation: Any, value: Any) -> Any:
    kinds = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    if annotation is bool:
        return parse_flag(value)
    if set(kinds) == {bool, int}:
        return _flag_or_count(value)
    if typing.get_origin(annotation) is typing.Literal and isinstance(value, str):
        words = {fold(word): word for word in typing.get_args(annotation) if isinstance(word, str)}
        return words.get(fold(value), value)
    return value


def _flag_or_count(value: Any) -> bool | int:
    for read in (parse_flag, parse_int):
        try:
            return read(value)
        except ValueError:
            continue
    raise ValueError("must be true, false or a whole number")
