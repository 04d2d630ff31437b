"""Checks a plugin's definition without calling its functions."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..api import Definition, OpDef


def faults(kind: str, name: str, definition: Definition) -> Iterator[str]:
    """Yield a message for each fault: wrong types of fields, references that do not exist, options that core has."""
    wrong = list(_wrong_fields(definition))
    yield from wrong
    if wrong:
        return
    if isinstance(definition, OpDef):
        yield from (f"op '{name}': {text}" for text in _wrong_reference(definition.reference))
    options: type[BaseModel] | None = getattr(definition, "options", None)
    if options is not None:
        taken = sorted(_core_keys(kind) & {info.alias or key for key, info in options.model_fields.items()})
        yield from (
            f"option '{key}' of {kind} '{name}' is a key of core's config; it needs another name" for key in taken
        )


def _wrong_fields(definition: Definition) -> Iterator[str]:
    for field in fields(definition):
        value, annotation = getattr(definition, field.name), str(field.type)
        expected = _expected(annotation, value)
        if expected:
            yield f"{type(definition).__name__}.{field.name} is {value!r:.80}, expected {expected}"


def _expected(annotation: str, value: Any) -> str:
    """Return what a field should hold by its annotation, or "" if the value is valid."""
    if value is None and annotation.endswith("| None"):
        return ""
    if annotation.startswith("Callable"):
        return "" if callable(value) else "a function"
    if annotation.startswith("type[BaseModel]"):
        fits = isinstance(value, type) and issubclass(value, BaseModel)
        return "" if fits else "a pydantic model (a class, not an instance)"
    if annotation.startswith("tuple[str"):
        return "" if isinstance(value, tuple | list) and all(isinstance(v, str) for v in value) else "a tuple of text"
    if annotation.startswith("tuple[int"):
        return "" if isinstance(value, tuple | list) and all(type(v) is int for v in value) else "a tuple of ints"
    if annotation.startswith("frozenset"):
        return "" if isinstance(value, frozenset | set) else "a frozenset"
    if annotation.startswith("str"):
        return "" if isinstance(value, str) else "text"
    if annotation == "bool":
        return "" if isinstance(value, bool) else "True or False"
    if annotation.startswith("Literal["):
        allowed = ast.literal_eval(annotation.removeprefix("Literal").strip())
        return "" if value in allowed else f"one of {', '.join(allowed)}"
    return ""


def _core_keys(kind: str) -> set[str]:
    """Return core's keys in the same mapping as the options of this kind."""
    from ..config.schema import DatasetEntry, TrainConfig

    return set(DatasetEntry.model_fields if kind == "format" else TrainConfig.model_fields)


# ----------------------------------------------------------------------------------------------------------- references


def _wrong_reference(reference: str) -> Iterator[str]:
    """Check that "module:function" exists. The module is parsed, not imported, because it may import torch."""
    module, colon, function = reference.partition(":")
    if not (module and colon and function.isidentifier()):
        yield f"reference '{reference}' is not of the form module:function"
        return
    try:
        spec = importlib.util.find_spec(module)
        file = spec.origin if spec and spec.origin and spec.origin.endswith(".py") else None
        names = _top_level_names(file) if file else None
    except Exception as error:  # from the parent package, which is imported, or a SyntaxError
        yield f"reference '{reference}': {type(error).__name__}: {error}"
        return
    if spec is None:
        yield f"reference '{reference}': there is no module {module}"
    elif names is not None and function not in names:
        yield f"reference '{reference}': {module} has no {function}"


@lru_cache(maxsize=256)
def _top_level_names(file: str) -> frozenset[str] | None:
    """Return the names that a source file binds at its top level. None if only running it would show them."""
    names: set[str] = set()
    for node in ast.parse(Path(file).read_bytes(), file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif not isinstance(node, ast.Expr):
            return None  # if, try, with, for: what they bind is known only at run time
    return None if names & {"*", "__getattr__"} else frozenset(names)
