"""Text of configuration errors: `run.yaml: key: what is wrong; what is allowed (got value)`."""

from __future__ import annotations

import math
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from surogate_core.errors import ConfigError, PluginError, SurogateError
from surogate_core.words import LONGEST_WORD, nearest

M = TypeVar("M", bound=BaseModel)

FLAG_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""The texts that a flag may have."""

_LONGEST_VALUE = 80

SECRET = "secret"
"""Type of a PydanticCustomError whose value no message shows."""

_TEXT = {
    "missing": "is required",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of at most 64 bits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "value_error": "{error}",
}


@dataclass(frozen=True)
class Problem:
    """One problem. key: its place, dotted (`datasets.0.path`). error: the cause, if that is a plugin."""

    key: str
    text: str
    error: PluginError | None = None

    def line(self, source: str) -> str:
        return f"{source}: {self.key}: {self.text}"


def shown(value: object) -> str:
    """Return any value as a short text on one line, for errors."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    abridged = reprlib.Repr()
    abridged.maxstring = abridged.maxother = abridged.maxlong = 60
    try:
        text = abridged.repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits; very deep nesting
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def shown_key(key: object) -> str:
    """Return any key as a short printable text, for errors."""
    text = key if isinstance(key, str) else shown(key)
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= LONGEST_WORD else text[: LONGEST_WORD - 3] + "..."


def unknown_key(key: object, legal: Iterable[str], *, within: str = "", meant: str | None = None) -> Problem:
    """Return the problem of an unknown key.

    within: the dotted place of its section, with a trailing dot; there, all legal keys are named if none is close.
    meant: the key to suggest; None: the closest one.
    """
    legal = sorted(legal)
    guess = meant or (nearest(key, legal) if isinstance(key, str) else None)
    elsewhere = "the config reference lists all keys, and `surogate convert` reads configs of other trainers"
    listed = f"the keys here are {', '.join(legal)}" if within else elsewhere
    hint = f"did you mean {guess}?" if guess else listed
    return Problem(within + shown_key(key), f"unknown key; {hint}")


def keys_of(model: type[BaseModel]) -> list[str]:
    """Return the keys that a model reads: the aliases, or else the names, of its fields."""
    return [info.alias or name for name, info in model.model_fields.items()]


def validate(model: type[M], values: Mapping[str, Any], *, within: str = "") -> tuple[M | None, list[Problem]]:
    """Validate `values` as `model`. Return (instance, []), or (None, problems) with at most one problem per field.

    Stricter than pydantic, to catch silent mistakes in YAML files: a bool is not a number, and numbers are finite.
    """
    problems: dict[str, Problem] = {}
    instance: M | None = None
    try:
        instance = model.model_validate(dict(values))
    except ValidationError as error:
        for details in error.errors(include_url=False):
            key = ".".join(str(part) for part in details["loc"][:1])
            problems.setdefault(key, _problem(details, model, within))
    except (OverflowError, RecursionError) as error:  # e.g. an int too large for a float
        problems.setdefault("", Problem(within.rstrip(".") or "config", f"cannot be read: {error}"))
    for key, (name, info) in zip(keys_of(model), model.model_fields.items(), strict=True):
        value = getattr(instance, name, None)
        if isinstance(values.get(key), bool) and _is_number(info.annotation):
            problems.setdefault(key, Problem(within + key, f"must be a number (got {shown(values[key])})"))
        elif isinstance(value, float) and not math.isfinite(value):
            problems.setdefault(key, Problem(within + key, f"must be a finite number (got {shown(value)})"))
    return (None if problems else instance), list(problems.values())


def problems_error(source: str, problems: Sequence[Problem]) -> SurogateError:
    """Return all problems as one ConfigError; a PluginError if a plugin is the only cause."""
    lines = [problem.line(source) for problem in problems]
    if len(problems) == 1 and problems[0].error is not None:
        return PluginError(lines[0])
    return ConfigError("\n".join(lines), lines)


def _problem(details: ErrorDetails, model: type[BaseModel], within: str) -> Problem:
    loc = details["loc"]
    name = shown_key(loc[0]) if loc else ""
    kind = details["type"]
    if kind == "extra_forbidden":
        return unknown_key(loc[0], keys_of(model), within=within)
    text = _TEXT.get(kind, "").format_map(details.get("ctx", {})) or details["msg"][:1].lower() + details["msg"][1:]
    got = "" if kind in ("missing", SECRET) else f" (got {shown(details['input'])})"
    return Problem((within + name).rstrip(".") or "config", text + got)


def _is_number(annotation: Any) -> bool:
    """Return whether values of this annotation are numbers and never bools."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _is_number(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
        return bool not in options and any(_is_number(option) for option in options)
    return annotation is int or annotation is float


@dataclass
class Findings:
    """The problems and notices that one call of `load_config` found, so that all of them are reported together.

    notices: lines to show the user once. failed: keys that already have a problem; validation does not report a
    second one for them.
    """

    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def wrong(self, key: str, text: str) -> None:
        """Record that `key` (dotted inside a section) cannot be used, and why."""
        self.problems.append(Problem(key, text))
        self.failed.add(key)
