"""Names that two plugins provide. Only a run that uses one of them is refused, with both sides and the off switch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..words import fold
from .provided import CORE, FLAT_OPTIONS, Plugin, Provided


def rivals(provided: Sequence[Provided]) -> dict[tuple[str, str], str]:
    """Return {(what, name) that two items claim: a sentence with both sides and how to switch one off}."""
    first: dict[tuple[str, str], Provided] = {}
    found: dict[tuple[str, str], str] = {}
    for item in provided:
        for what, name in _claims(item):
            other = first.setdefault((what, fold(name)), item)
            if other is not item:
                found.setdefault((what, fold(name)), _conflict(what, name, other.plugin, item.plugin))
    return found


def option_conflicts(provided: Sequence[Provided]) -> Iterator[tuple[str, str]]:
    """Yield (key, sentence) of every option that two plugins declare and do not share."""
    options: dict[str, Provided] = {}
    for item, key in _flat_options(provided):
        first = options.setdefault(key, item)
        if first.plugin.distribution != item.plugin.distribution and not _alike(first, item, key):
            yield key, _conflict("option", key, first.plugin, item.plugin)


def _claims(item: Provided) -> Iterator[tuple[str, str]]:
    """Yield the names that only one item may have. Several kernels may serve one op: `kernel_for` ranks them."""
    if item.kind == "kernel":
        return
    yield item.kind, item.name
    if item.kind == "model":
        yield from (("architecture", name) for name in item.definition.architectures)
        yield from (("model type", name) for name in item.definition.model_types)
    if item.kind == "weight format":
        yield "key of a weight format", item.definition.key


def _flat_options(provided: Iterable[Provided]) -> Iterator[tuple[Provided, str]]:
    for item in provided:
        if item.kind in FLAT_OPTIONS:
            for name, field in item.definition.options.model_fields.items():
                yield item, field.alias or name


def _alike(first: Provided, second: Provided, key: str) -> bool:
    """Return whether two plugins share an option: both inherit it from one options model, or they are of one kind, of
    which a run uses one, and declare the same type, bounds and default.
    """
    if _declares(first, key) is _declares(second, key):
        return True
    if first.kind != second.kind:
        return False
    one, other = (_field(item, key) for item in (first, second))
    return (one.annotation, one.metadata, one.default) == (other.annotation, other.metadata, other.default)


def _field(item: Provided, key: str) -> FieldInfo:
    options: type[BaseModel] = item.definition.options
    return next(field for name, field in options.model_fields.items() if key == (field.alias or name))


def _declares(item: Provided, key: str) -> type:
    """Return the class that first declares an option."""
    options: type[BaseModel] = item.definition.options
    for cls in reversed(options.__mro__):
        if key in inspect.get_annotations(cls):
            return cls
    return options


def _conflict(what: str, name: str, first: Plugin, second: Plugin) -> str:
    off = f"SUROGATE_PLUGINS=-{(first if second.distribution == CORE else second).distribution}"  # core stays
    if first.distribution == second.distribution:
        return f"{what} '{name}' is provided twice by {first}; uninstall it or set {off}"
    return f"{what} '{name}' is provided by {first} and {second}; uninstall one or set {off}"
