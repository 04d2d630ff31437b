"""Reads what a file of another trainer sets: YAML, JSON, a command line, or a Python script, which is not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from surogate_core.api import ConfigError

from .leaves import Leaf, leaves_of
from .scripts import read_script
from .shell import read_command
from .source import Source, read_json, typed

_SECTIONS = ("data", "training", "lora", "logging")
"""Sections of `unsloth train`."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: only the last would be read."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.MarkedYAMLError(None, None, f"{key} is given twice; keep one", node.start_mark)
        return super().construct_mapping(node, deep)


def read(path: Path) -> Source:
    """Return what a file sets. Raises ConfigError for one that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Give a YAML, JSON, Python or shell file.") from None
    if path.suffix == ".py":
        return read_script(path, text)
    if path.suffix in (".sh", ".txt", ".bash"):
        return read_command(path, text)
    try:
        value = read_json(text) if path.suffix == ".json" else yaml.load(text, _Loader)
    except (ValueError, RecursionError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{path}: has no keys. Give the config of a run.")
    leaves: list[Leaf] = []
    for owner, (key, inner) in enumerate(value.items(), 1):
        section = inner if key in _SECTIONS and isinstance(inner, dict) and inner else {key: inner}
        leaves += leaves_of(typed(section), owner=owner)
    return Source(leaves, {str(key) for key in value})
