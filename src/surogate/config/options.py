"""The keys of plugins: each plugin's `options` model, mounted flat among core's keys and read as these are."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from surogate_core.api import NoOptions
from surogate_core.words import fold

from .errors import Findings, Problem, keys_of, shown, validate
from .registry import Registry
from .selection import REQUIRED
from .values import parse_flag, parse_int

Owner = tuple[str, str]
"""(kind, name) of a definition."""

SELECTED_BY_KEYS = ("offload", "weight format")
"""Kinds whose own options say whether a run uses them."""

SELECTED_BY_FILES = "model"
"""The kind that the files of the run's model select, after its keys were read (`model_options.of_model`)."""


def owners_of_keys(models: Mapping[Owner, type[BaseModel]]) -> dict[str, list[Owner]]:
    """Return {key: the definitions whose options declare it}."""
    owners: dict[str, list[Owner]] = {}
    for owner, model in models.items():
        for key in keys_of(model):
            owners.setdefault(key, []).append(owner)
    return owners


def validate_selected(
    core: Mapping[str, Any], adapter: str | None, given: Mapping[str, Any], registry: Registry, findings: Findings
) -> dict[Owner, BaseModel]:
    """Return the options of the selected plugins, and of all models that have keys in `given`.

    given: the plugins' keys of the config.

    Keys of plugins that are not selected are validated too; a notice says that they have no effect.
    """
    models = registry.options_models()
    selected = [(kind, core[kind]) for kind in REQUIRED if kind in core]
    selected += [(kind, name) for kind in SELECTED_BY_KEYS for name in registry.names(kind)]
    selected += [("adapter", adapter)] if adapter is not None else []
    selected += [("logger", name) for name in core.get("report_to", ())]
    selected += [(kind, name) for (kind, name), model in models.items() if _may_be_used(kind, model, given)]
    options: dict[Owner, BaseModel] = {}
    for owner in selected:
        model = models.get(owner, NoOptions)
        values = {key: given[key] for key in keys_of(model) if key in given}
        instance, problems = validate_options(owner, model, values, registry)
        findings.problems += problems
        if instance is not None:
            options[owner] = instance
    owners = owners_of_keys(models)
    for key, value in given.items():
        if not any(owner in selected for owner in owners[key]):
            if adapter is not None and _says_what_to_train(key, value, owners[key][0], models):
                names = " or ".join(name for _, name in owners[key])
                what = f"is of adapter {names}, and this run trains adapter {adapter}, which does not read it"
                findings.wrong(key, f"{what}; remove the key, or set adapter: {owners[key][0][1]}")
            else:
                _check_idle(key, value, owners[key], models, registry, findings)
    return options


def _may_be_used(kind: str, model: type[BaseModel], given: Mapping[str, Any]) -> bool:
    """Return whether these are options of a model for which the config has keys."""
    return kind == SELECTED_BY_FILES and not given.keys().isdisjoint(keys_of(model))


def idle_notice(key: str, owners: Sequence[Owner]) -> str:
    """Return the notice for a key that is read by none but `owners`, which the run does not use."""
    unused = " or ".join(f"{kind} {name}" for kind, name in owners)
    return f"{key}: has no effect, since {unused} is not used by this run"


def _says_what_to_train(key: str, value: Any, owner: Owner, models: Mapping[Owner, type[BaseModel]]) -> bool:
    """Return whether a key is of an adapter, and has another value than its default: without it, others are trained."""
    model = models[owner]
    default = dict(zip(keys_of(model), model.model_fields.values(), strict=True))[key].default
    is_default = value == default or (not value and not default) or (isinstance(value, list) and (*value,) == default)
    return owner[0] == "adapter" and not is_default


def validate_options(
    owner: Owner, model: type[BaseModel], given: Mapping[str, Any], registry: Registry, within: str = ""
) -> tuple[BaseModel | None, list[Problem]]:
    """As `validate`. A field whose type is a model is a section, whose keys are read alike; null is the default.

    Raises PluginError if a validator of the plugin fails with anything but a ValidationError.
    """
    values, problems = as_core_reads(model, given, within)
    for key, info in zip(keys_of(model), model.model_fields.values(), strict=True):
        if key in given and isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            section, wrong_inside = _validate_section(owner, info.annotation, given[key], registry, f"{within}{key}")
            problems += wrong_inside
            values = {name: value for name, value in values.items() if name != key}
            values |= {} if section is None else {key: section}
    wrong = {problem.key for problem in problems}
    try:
        instance, others = validate(model, values, within=within)
    except Exception as error:
        failed = registry.failed(*owner, "options", error)
        if failed is None:
            raise
        raise failed from error
    return None if wrong else instance, [*problems, *(problem for problem in others if problem.key not in wrong)]


def _validate_section(
    owner: Owner, model: type[BaseModel], given: Any, registry: Registry, within: str
) -> tuple[BaseModel | None, list[Problem]]:
    if not isinstance(given, Mapping):
        return None, [Problem(within, f"must be a section of keys (got {shown(given)})")]
    values = {key: value for key, value in given.items() if value is not None}
    return validate_options(owner, model, values, registry, f"{within}.")


def _check_idle(
    key: str,
    value: Any,
    owners: Sequence[Owner],
    models: Mapping[Owner, type[BaseModel]],
    registry: Registry,
    findings: Findings,
) -> None:
    kind, name = owners[0]
    _, problems = validate_options(owners[0], models[kind, name], {key: value}, registry)
    findings.problems += [problem for problem in problems if problem.key.partition(".")[0] == key]
    findings.notices.append(idle_notice(key, owners))


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
