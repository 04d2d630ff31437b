"""Read and write YAML: a file or a `--set` value becomes plain mappings, lists and scalars, or a ConfigError.

Scalars follow YAML 1.2: `2e-4` is a number; `no`, `0123` and `2024-01-01` are text. Stricter than YAML where a mistake
would go unnoticed or exhaust the machine: no duplicate keys, no keys that are not text, no tags, bounded size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from surogate_core.errors import ConfigError

from .errors import shown, shown_key

MAX_BYTES = 1 << 20
MAX_NODES = 50_000
MAX_DEPTH = 32

_PREFIX = "tag:yaml.org,2002:"
_SCALARS = {
    "null": re.compile(r"^(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"^-?(?:0|[1-9][0-9]*)$"),
    "float": re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    "merge": re.compile(r"^<<$"),
}


class _Loader(yaml.SafeLoader):
    """Composes nodes with the scalars above only; `_Construction` turns them into values."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or 1.2 would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        breaks = any(char in text for char in "\x85\u2028\u2029")  # other styles fold these like newlines
        return self.represent_scalar(_PREFIX + "str", text, style='"' if breaks else None)


_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in _SCALARS.items():
    yaml.add_implicit_resolver(_PREFIX + _name, _pattern, None, Loader=_Loader, Dumper=_Dumper)


def read_yaml(path: Path | str) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError naming the file, and line and column of the mistake."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML config") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; give the path of a YAML config") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown_key(str(path))}: cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES} bytes; this is not a config")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    value = parse_yaml(text, source=str(path))
    if value is None:
        raise ConfigError(f"{path}: is empty; a config must name at least a model")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values (got {shown(value)})")
    return value


def parse_yaml(text: str, *, source: str) -> Any:
    """Return the value of a YAML document. `source` names it in errors. Raises ConfigError."""
    try:
        node = yaml.compose(text, _Loader)
        return None if node is None else _Construction(source).value(node, depth=0)
    except yaml.MarkedYAMLError as error:
        place = _place(error.problem_mark or error.context_mark)
        raise ConfigError(f"{source}: {place}not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{source}: is nested more than {MAX_DEPTH} levels deep") from None


def dump_yaml(value: Mapping[str, Any]) -> str:
    """Return YAML text that `read_yaml` reads back as an equal mapping; keys keep their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `raw` with each `key=value` of `--set` applied, in order.

    The value is YAML (`2e-4`, `[a, b]`, empty for the default). A dotted key reaches inside: `distributed.num_nodes=2`,
    `datasets.0.path=x`; the index one past the end appends. Raises ConfigError naming the override.
    """
    result: dict[str, Any] = _copy(raw)
    for override in overrides:
        source = f"--set {shown_key(override)}"
        key, equals, text = override.partition("=")
        steps = key.strip().split(".")
        if not equals or not all(steps):
            raise ConfigError(f"{source}: must look like key=value (or section.key=value)")
        _place_at(result, steps, parse_yaml(text, source=source), source)
    return result


class _Construction:
    """Turns composed nodes into values and counts them: aliases can expand a small file exponentially."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.nodes = 0

    def value(self, node: yaml.Node, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.error(node, f"holds more than {MAX_NODES} values, aliases counted; this is not a config")
        if depth > MAX_DEPTH:
            raise self.error(node, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            return self.mapping(node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            return [self.value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.ScalarNode) and node.tag.startswith(_PREFIX):
            return self.scalar(node, node.tag.removeprefix(_PREFIX))
        raise self.error(node, f"the tag {shown_key(node.tag)} is not allowed; write a plain value")

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _PREFIX + "merge":
                merged = self.merge(value_node, depth) | merged
                continue
            if key_node.tag != _PREFIX + "str":
                text = key_node.value if isinstance(key_node, yaml.ScalarNode) else "of this entry"
                raise self.error(key_node, f"the key {shown_key(text)} is not text; put it in quotes")
            if key_node.value in own:
                raise self.error(key_node, f"the key {shown_key(key_node.value)} is given twice")
            own[key_node.value] = self.value(value_node, depth + 1)
        return merged | own

    def merge(self, node: yaml.Node, depth: int) -> dict[str, Any]:
        value = self.value(node, depth + 1)
        sources = value if isinstance(value, list) else [value]
        if not all(isinstance(source, dict) for source in sources):
            raise self.error(node, "<< takes a mapping or a list of mappings")
        return {key: value for source in reversed(sources) for key, value in source.items()}

    def scalar(self, node: yaml.ScalarNode, tag: str) -> Any:
        text = node.value
        if tag == "str" or tag == "merge":
            return text
        if tag not in _SCALARS or not _SCALARS[tag].match(text):
            raise self.error(node, f"{shown(text)} is not a value of the tag !!{shown_key(tag)}; write a plain value")
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if len(text) > 40:
            raise self.error(node, "the number has too many digits")
        return int(text)

    def error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self.source}: {_place(node.start_mark)}{text}")


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _place_at(container: Any, steps: Sequence[str], value: Any, source: str) -> None:
    """Set `value` at the path `steps` inside `container`, creating missing mappings and lists on the way."""
    step, rest = steps[0], steps[1:]
    key: Any = step
    if isinstance(container, list):
        if not (step.isascii() and step.isdigit() and len(step) < 9 and int(step) <= len(container)):
            raise ConfigError(f"{source}: {shown_key(step)} must be an index from 0 to {len(container)}")
        key = int(step)
        if key == len(container):
            container.append(None)
    elif not isinstance(container, dict):
        raise ConfigError(f"{source}: cannot set {shown_key(step)} inside {shown(container)}, which is not a section")
    if not rest:
        container[key] = value
        return
    if (container[key] if isinstance(container, list) else container.get(key)) is None:
        container[key] = [] if rest[0] == "0" else {}
    _place_at(container[key], rest, value, source)
