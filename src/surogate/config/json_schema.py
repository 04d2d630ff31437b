"""The YAML file of a run as JSON Schema, for completion, help and errors in editors.

It is made from the models and tables that validate configs. What needs several keys or files is left to `load_config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from .dataset_entry import DatasetEntry
from .errors import FLAG_WORDS
from .keys import ALIASES, DEAD, IGNORED, MEANS, NOT_YET
from .registry import Registry
from .schema import TrainConfig
from .selection import AUTO, OPTIONAL, REQUIRED

DRAFT: Final = "http://json-schema.org/draft-07/schema#"
Schema = dict[str, Any]

_VARIABLE: Final = r"\$\{?[A-Za-z_]"
_TEXT: Final = {"type": "string"}
_FLAG: Final = {"type": "string", "pattern": f"^({'|'.join(FLAG_WORDS)})$|{_VARIABLE}"}
_NUMBER: Final = {"type": "string", "pattern": rf"^\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*$|{_VARIABLE}"}
_BOUNDS: Final = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""A bound of pydantic beside a choice of schemas -> the word of JSON Schema, which bounds the numbers among them."""


class _Schemas(GenerateJsonSchema):
    """Schemas of what the config accepts: numbers and flags as text too, names in any case, with `-` or `_`."""

    def int_schema(self, schema: Any) -> Schema:
        return _either(super().int_schema(schema), _NUMBER)

    def float_schema(self, schema: Any) -> Schema:
        return _either(super().float_schema(schema), _NUMBER)

    def bool_schema(self, schema: Any) -> Schema:
        return _either(super().bool_schema(schema), _FLAG)

    def literal_schema(self, schema: Any) -> Schema:
        return _choice(schema["expected"])

    def tuple_schema(self, schema: Any) -> Schema:
        return _either(super().tuple_schema(schema), _TEXT)


def config_schema(registry: Registry) -> Schema:
    """Return the schema of a config for the plugins of `registry`."""
    keys = _properties(TrainConfig)
    for model in registry.options_models().values():
        for key, schema in _properties(model).items():
            keys[key] = _merged(keys[key], schema) if key in keys else schema
    for kind in (*REQUIRED, *OPTIONAL):
        more = {"launcher": [AUTO], "adapter": ["none"]}.get(kind, [])
        keys[kind] = _described(keys[kind], _choice([*registry.names(kind), *more]))
    loggers = _choice([*registry.names("logger"), "none"])
    keys["report_to"] = _described(keys["report_to"], _either(loggers, {"type": "array", "items": loggers}))
    for key in ("datasets", "validation_datasets"):
        entries = {"type": "array", "items": _either(_TEXT, _entry(registry))}
        keys[key] = _described(keys[key], _either(_TEXT, entries))
    properties = {key: _or_null(schema) for key, schema in keys.items()}
    for alias, key in ALIASES.items():
        if key in properties:
            properties[alias] = _hidden(properties[key], f"another name of {key}")
    return {
        "$schema": DRAFT,
        "title": "Config of a run of Surogate",
        "type": "object",
        "required": ["model"],
        "properties": _unserved(properties) | properties,
        "additionalProperties": False,
    }


def _entry(registry: Registry) -> Schema:
    """Return the schema of an entry of `datasets`: the keys of its type, or those of any if it names none."""
    formats = registry.dataset_formats()
    own = {key: schema for key, schema in _properties(DatasetEntry).items() if key != "options"}
    own["type"] = _described(own["type"], _choice([*formats, AUTO]))
    keys = dict(own)
    rules = []
    for name, definition in formats.items():
        options = _properties(definition.options)
        for key, schema in options.items():
            keys[key] = _merged(keys[key], schema) if key in keys else schema
        named = {"properties": {"type": {"const": name}}, "required": ["type"]}
        rules.append({"if": named, "then": {"propertyNames": {"enum": [*own, *options]}}})
    return {
        "type": "object",
        "required": ["path"],
        "properties": {key: _or_null(schema) for key, schema in keys.items()},
        "additionalProperties": False,
        "allOf": rules,
    }


def _properties(model: type[BaseModel]) -> dict[str, Schema]:
    """Return {key: its schema}, with the schemas of sections in their place."""
    whole = model.model_json_schema(schema_generator=_Schemas)
    sections = whole.get("$defs", {})

    def placed(schema: Any) -> Any:
        if isinstance(schema, list):
            return [placed(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        named = sections[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}
        both = {**named, **schema}.items()
        return {_BOUNDS.get(key, key): placed(value) for key, value in both if key not in ("$ref", "title")}

    return {key: placed(schema) for key, schema in whole.get("properties", {}).items()}


def _unserved(served: Iterable[str]) -> dict[str, Schema]:
    """Return the keys that are known but not served: they take the values that change nothing."""
    found: dict[str, Schema] = {flag: _hidden({}, f"means {key}: {value}") for flag, (key, value) in MEANS.items()}
    found |= {key: _hidden({}, f"nothing reads this key: {why}") for key, why in IGNORED.items()}
    for key, entry in (DEAD | NOT_YET).items():
        said = f"{entry.why}{';' if entry.feature else ':'} {entry.instead}"
        schema = _hidden(_choice([None, *entry.accepted]), said)
        section, _, inner = key.rpartition(".")
        if section:
            outer = found.setdefault(section, _hidden({"type": ["object", "null"], "properties": {}}, said))
            outer["properties"][inner] = schema
            outer["additionalProperties"] = False
        else:
            found[key] = schema
    return {key: schema for key, schema in found.items() if key not in served}


def _hidden(schema: Schema, said: str) -> Schema:
    """Return a schema that editors do not propose, and mark where it is used."""
    return {**schema, "description": said, "deprecationMessage": said, "doNotSuggest": True}


def _choice(values: Iterable[Any]) -> Schema:
    """Return the schema of one of `values`: flags also as words, names as the config folds them."""
    listed = list({repr(value): value for value in values}.values())
    if "true" in listed and "false" in listed:
        listed += [True, False]
    words = [value for value in listed if isinstance(value, str) and value]
    spelled = "|".join("".join(_letter(char) for char in word) for word in words)
    others = [{"type": "string", "pattern": f"^({spelled})$|{_VARIABLE}"}] if words else []
    numbers = any(isinstance(value, int) and not isinstance(value, bool) for value in listed)
    return _either({"enum": listed}, *others, *([_NUMBER] if numbers else []))


def _letter(char: str) -> str:
    if char in "-_":
        return "[-_]"
    return f"[{char.lower()}{char.upper()}]" if char.isalpha() else re.escape(char)


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)} if len(schemas) > 1 else schemas[0]


def _described(key: Schema, values: Schema) -> Schema:
    """Return the schema `values` with what `key` says about the key."""
    return values | {name: key[name] for name in ("description", "default") if name in key}


def _merged(one: Schema, other: Schema) -> Schema:
    """Return the schema of a key that two definitions have: it takes what either takes."""
    return one if one == other else _described(other, _either(one, other)) | _described(one, {})


def _or_null(schema: Schema) -> Schema:
    """Return a schema that also takes null, which means the default."""
    about: Mapping[str, Any] = _described(schema, {})
    rest = {key: value for key, value in schema.items() if key not in about}
    options = rest["anyOf"] if rest.keys() == {"anyOf"} else [rest]
    return {**about, "anyOf": [*options, *([] if {"type": "null"} in options else [{"type": "null"}])]}
