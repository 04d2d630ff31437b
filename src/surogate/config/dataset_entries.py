"""The entries of `datasets` and `validation_datasets`: core's keys, and the keys of each entry's dataset type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

from surogate_core.words import fold

from .dataset_entry import DatasetEntry
from .errors import Findings, keys_of, shown, unknown_key, validate
from .keys import foreign
from .options import validate_options
from .registry import Registry
from .selection import registered_name


def parse_datasets(key: str, value: Any, registry: Registry, findings: Findings) -> tuple[DatasetEntry, ...]:
    """Return the usable entries of the list `value` of `key`; every other one is a problem.

    A path is short for an entry of type auto, and for a list of one.
    """
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple):
        findings.wrong(key, f"must be a list of entries, each a path or a mapping with one (got {shown(value)})")
        return ()
    entries = [_parse_entry(f"{key}.{index}", entry, registry, findings) for index, entry in enumerate(value)]
    return tuple(entry for entry in entries if entry is not None)


def _parse_entry(place: str, given: Any, registry: Registry, findings: Findings) -> DatasetEntry | None:
    """Validate one entry; the keys of its type become `options`. None, with problems, if it cannot be used."""
    given = {"path": given} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        findings.wrong(place, f"must be a path, or a mapping with one (got {shown(given)})")
        return None
    within = f"{place}."
    known = DatasetEntry.model_fields.keys() - {"options"}
    values = {key: value for key, value in given.items() if key in known and value is not None}
    if not isinstance(values.get("path", ""), str | int | float):
        findings.wrong(
            f"{within}path",
            "is data in memory, which surogate.train, .tokenize and .plan take; or write it first, such as "
            "dataset.to_parquet('rows.parquet') or one JSON object a line, and give that path",
        )
        return None
    entry, problems = validate(DatasetEntry, values, within=within)
    findings.problems += problems
    if entry is None:
        return None
    name = (
        "auto"
        if fold(entry.type) == "auto"
        else registered_name("format", f"{within}type", entry.type, registry, findings)
    )
    if name is None:
        return None
    others = {key: value for key, value in given.items() if key not in known}
    options = _format_options(name, others, within, registry, findings)
    return entry.model_copy(update={"type": name, "options": options})


def _meant(key: object) -> str | None:
    return foreign()["entries"].get(fold(key)) if isinstance(key, str) else None


def _format_options(
    name: str, given: Mapping[str, Any], within: str, registry: Registry, findings: Findings
) -> dict[str, Any]:
    """Validate the keys of a dataset's type. With `auto`, at least one type must accept all of them.

    A null is kept for a key that takes null: `system_field: null` is no column, also where the default names one. For
    any other key it is the default.
    """
    formats = registry.dataset_formats()
    candidates = [formats[name]] if name != "auto" else list(formats.values())
    legal = {key for candidate in candidates for key in keys_of(candidate.options)}
    unknown = [key for key in given if key not in legal]
    for key in unknown:
        words = {*legal, *DatasetEntry.model_fields} - {"options"}
        findings.problems.append(unknown_key(key, words, within=within, meant=_meant(key)))
    if unknown or not candidates or (name == "auto" and not given):
        return {}
    results = [
        validate_options(("format", c.name), c.options, _without_defaults(given, c.options), registry, within)
        for c in candidates
    ]
    for options, _ in results:
        if options is not None:
            return options.model_dump(mode="json", by_alias=True, exclude_unset=True)
    findings.problems += min((problems for _, problems in results), key=lambda found: len(list(found)))
    return {}


def _without_defaults(given: Mapping[str, Any], options: type[BaseModel]) -> dict[str, Any]:
    """Return `given` without the keys that are null and whose field takes no null: these have their default."""
    fields = zip(keys_of(options), options.model_fields.values(), strict=True)
    filled = {key for key, info in fields if type(None) not in get_args(info.annotation) and info.annotation is not Any}
    return {key: value for key, value in given.items() if value is not None or key not in filled}
