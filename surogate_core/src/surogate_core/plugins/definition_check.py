"""Checks a plugin's definition without calling its functions, but for validators of its options."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..api import (
    ADAPTER_LABEL,
    WEIGHT_LABEL,
    Definition,
    ExportFormatDef,
    KernelDef,
    LauncherDef,
    ModelDef,
    OffloadDef,
    OpDef,
    WeightFormatDef,
)
from ..front_end import front_end
from ..program.labels import BLOCK_INPUT, KEY, LABELS
from .field_types import wrong_field


def faults(kind: str, name: str, definition: Definition) -> Iterator[str]:
    """Yield a message for each fault: wrong values of fields, references that do not exist, options or labels that core
    has.
    """
    if wrong := wrong_field(type(definition), definition):
        yield wrong
        return
    if isinstance(definition, OpDef):
        yield from (f"op '{name}': {text}" for text in _wrong_reference(definition.reference))
        if definition.attention and not {"head_dim", "seq_len"} <= definition.attrs.keys():
            yield f"op '{name}' is attention and lacks the attributes head_dim and seq_len, by which plans price it"
    module = definition.module if isinstance(definition, KernelDef) else ""
    if module and importlib.util.find_spec(module.partition(".")[0]) is None:
        yield f"KernelDef.module is {module!r}, which is in no package that is installed"
    if isinstance(definition, OffloadDef) and definition.on_host is None and definition.schedule is None:
        yield "OffloadDef has neither on_host nor schedule, so it would move nothing"
    if isinstance(definition, LauncherDef) and definition.join is None and definition.start is None:
        yield "LauncherDef has neither join nor start, so it would train nothing"
    if isinstance(definition, ExportFormatDef):
        yield from (f"export format '{name}' has ':' in {text!r}" for text in (name, *definition.types) if ":" in text)
    if isinstance(definition, ModelDef):
        yield from _wrong_labels(definition.recompute)
    if hasattr(definition, "options"):
        yield from _wrong_options(kind, name, definition)


# --------------------------------------------------------------------------------------------------------------- labels


def _wrong_labels(own: Mapping[str, frozenset[str]]) -> Iterator[str]:
    keys = {f"{KEY}{part}": labels for part, labels in LABELS.items()}
    for key in sorted(own.keys() - keys.keys()):
        yield f"ModelDef.recompute has the key {key!r}, expected {', '.join(sorted(keys))}"
    for key, label in sorted((key, label) for key, labels in own.items() for label in labels):
        having = [name for name, labels in keys.items() if label in labels]
        if having or label in (BLOCK_INPUT, ADAPTER_LABEL, WEIGHT_LABEL):
            whose = f"core has for {', '.join(having)}" if having else "core has for what no such key drops"
            yield f"ModelDef.recompute: {key} has the label {label!r}, which {whose}; a model adds labels of its own"


# -------------------------------------------------------------------------------------------------------------- options


def _wrong_options(kind: str, name: str, definition: Any) -> Iterator[str]:
    options: type[BaseModel] = definition.options
    keys = {info.alias or key: info for key, info in options.model_fields.items()}
    for key in sorted(set(front_end().keys(kind)) & keys.keys()):
        yield f"option '{key}' of {kind} '{name}' is a key of the config itself; it needs another name"
    if options.model_config.get("extra") != "forbid":
        yield f"options of {kind} '{name}' lack ConfigDict(extra=\"forbid\"), so they would ignore misspelt keys"
    if required := [key for key, info in keys.items() if info.is_required()]:
        yield f"options of {kind} '{name}': {', '.join(required)} has no default"
        return
    defaults = {key: info.get_default(call_default_factory=True) for key, info in keys.items()}
    if wrong := _refused(options, defaults):
        yield f"options of {kind} '{name}': a default is refused: {wrong}"
        return
    if isinstance(definition, WeightFormatDef):
        info = options.model_fields.get(definition.key)
        if info is None or info.annotation is not bool or info.default is not False:
            wanted = "an option of type bool, False by default"
            yield f"{type(definition).__name__}.key is {definition.key!r}, expected {wanted}"
    for proposed in definition.proposed if isinstance(definition, OffloadDef) else ():
        if unknown := sorted(set(proposed) - set(keys)):
            yield f"OffloadDef.proposed has {', '.join(unknown)}; options: {', '.join(keys)}"
        elif wrong := _refused(options, {**defaults, **proposed}):
            yield f"OffloadDef.proposed has a value that is refused: {wrong}"


def _refused(options: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return which of the values the options refuse, and why; "" if none."""
    try:
        options.model_validate(values)
    except ValidationError as error:
        for wrong in error.errors():
            key = ".".join(map(str, wrong["loc"]))
            return f"{key}: {wrong['input']!r:.80}: {wrong['msg']}"
    except Exception:  # of a validator of the plugin: the run that selects it tells
        pass
    return ""


# ----------------------------------------------------------------------------------------------------------- references


def _wrong_reference(reference: str) -> Iterator[str]:
    """Check that "module:function" exists. The module is parsed, not imported, because it may import torch."""
    module, colon, function = reference.partition(":")
    if not (module and colon and function.isidentifier()):
        yield f"reference '{reference}' is not of the form module:function"
        return
    if module == "__main__":  # a script, or a notebook: what it has defined is there already
        if not hasattr(sys.modules[module], function):
            yield f"reference '{reference}': this program has no {function}"
        return
    try:
        spec = importlib.util.find_spec(module)
        file = spec.origin if spec and spec.origin and spec.origin.endswith(".py") else None
        names = _top_level_names(file) if file else None
    except Exception as error:  # from the parent package, which is imported, or a SyntaxError
        yield f"reference '{reference}': {type(error).__name__}: {error}"
        return
    if spec is None:
        hint = f'a function of the same file is f"{{__name__}}:{function}"'
        yield f"reference '{reference}': there is no module {module}; {hint}"
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
