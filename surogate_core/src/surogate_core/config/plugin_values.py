"""Values of plugins' options, read as core reads its own: flags and choices by the same words."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from .errors import Problem, fold, keys_of, shown
from .values import parse_flag, parse_int


def as_core_reads(
    model: type[BaseModel], given: Mapping[str, Any], within: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values with flags, counts and choices translated, and a problem for each that cannot be.

    A field `bool` takes what core's flags take; a `Literal` its words in any case, with `-` or `_`; `bool | int` and
    `bool | Literal` a flag, or a whole number or a word. Everything else is left to the model.
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
        return _flag_or("a whole number", value, parse_int)
    words = {fold(word): word for kind in (annotation, *kinds) for word in _words(kind)}
    found = words.get(fold(value), value) if isinstance(value, str) else value
    if len(kinds) == 2 and bool in kinds and words:
        return found if found in words.values() else _flag_or(" or ".join(words.values()), value)
    return found


def _words(kind: Any) -> list[str]:
    is_literal = typing.get_origin(kind) is typing.Literal
    return [word for word in typing.get_args(kind) if isinstance(word, str)] if is_literal else []


def _flag_or(what: str, value: Any, *others: Callable[[Any], Any]) -> Any:
    for read in (parse_flag, *others):
        try:
            return read(value)
        except ValueError:
            continue
    raise ValueError(f"must be true, false or {what}")
