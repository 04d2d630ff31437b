"""Keys and names that core knows but does not serve: not built, never read, or served by another package.

The tables are in `original.toml`. In core, only they, this file and `schema.py` may name the things of plugins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FLAG_WORDS, fold


@dataclass(frozen=True)
class NotYet:
    """A key whose feature is not built. The values `default` and `inert` are accepted and have no effect.

    matters_with: if this key is set too, only `default` is accepted.
    """

    meaning: str
    feature: str
    instead: str
    default: Any = None
    inert: Sequence[Any] = ()
    matters_with: str = ""

    def accepts(self, value: Any, given: Collection[str] = ()) -> bool:
        """Return whether `value` has no effect in a config that sets the keys `given`."""
        inert = () if self.matters_with in given else self.inert
        return any(same_value(value, harmless) for harmless in (None, self.default, *inert))


@dataclass(frozen=True)
class Dead:
    """A key that nothing reads. accepted: values, besides null, that change nothing; others are refused."""

    accepted: Sequence[Any]
    instead: str

    def accepts(self, value: Any) -> bool:
        return any(same_value(value, inert) for inert in (None, *self.accepted))


def same_value(value: Any, inert: Any) -> bool:
    """Return whether a raw YAML value means `inert`: numbers may be strings, names are folded."""
    if isinstance(inert, list):
        values = value if isinstance(value, list) else [value]
        return len(values) == len(inert) and all(map(same_value, values, inert))
    if isinstance(value, bool) or value is None or inert is None:
        return value is inert
    if isinstance(inert, bool):
        return isinstance(value, str) and FLAG_WORDS.get(fold(value)) is inert
    if isinstance(inert, str):
        return isinstance(value, str) and fold(value) == fold(inert)
    try:
        return isinstance(value, int | float | str) and float(value) == float(inert)
    except (ValueError, OverflowError):
        return False


@dataclass(frozen=True)
class Shorthand:
    """A boolean key that selects a plugin: `key: true` means `kind: name`.

    package: what provides the plugin. title: the plugin's name in sentences.
    """

    key: str
    kind: str
    name: str
    package: str
    title: str


def read_table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


_TABLES = read_table("original.toml")

NOT_YET: dict[str, NotYet] = {
    row["key"]: NotYet(
        feature=group["feature"], instead=group["instead"], **{name: row[name] for name in row if name != "key"}
    )
    for group in _TABLES["not_yet"]
    for row in group["keys"]
}
"""By key; a key of a section is dotted."""

SECTIONS: frozenset[str] = frozenset(key.partition(".")[0] for key in NOT_YET if "." in key)

NOT_YET_NAMES: dict[tuple[str, str], str] = {
    (kind, name): instead for kind, names in _TABLES["not_yet_names"].items() for name, instead in names.items()
}
"""(kind, folded name) of the original that no package provides yet -> what to use."""

DISTRIBUTIONS: dict[tuple[str, str], str] = {
    (kind, fold(name)): package for kind, names in _TABLES["distributions"].items() for name, package in names.items()
}
"""(kind, folded name) -> the package of this project that provides it."""

ADAPTER_FIELDS: dict[str, str] = _TABLES["adapter_fields"]
"""Field of a saved adapter's config that is on -> the package of this project that reads such an adapter."""

PACKAGES: dict[str, str] = {key: package for package, keys in _TABLES["packages"].items() for key in keys}
"""Key of a package that may not be installed -> the package."""

IGNORED: dict[str, str] = _TABLES["ignored"]
"""Key that nothing reads and whose value cannot matter -> the reason. Accepted with a notice."""

DEAD: dict[str, Dead] = {key: Dead(**row) for key, row in _TABLES["dead"].items()}
"""Keys of the original that nothing reads here: any value except the original's default is refused."""

MEANS: dict[str, tuple[str, str]] = {key: (row["key"], row["value"]) for key, row in _TABLES["means"].items()}
"""Flag of the original -> the key of TrainConfig and its value that `true` means."""

ALIASES: dict[str, str] = _TABLES["aliases"]
"""Other name of a key -> the key."""

ADAPTER_FLAG = Shorthand("lora", "adapter", "lora", DISTRIBUTIONS["adapter", "lora"], "LoRA")
"""`lora: true` means `adapter: lora`, and `surogate sft` sets it by default. Code of core that needs an adapter's name
takes it from here."""

HELD_FOR_UPDATE = "Set offload_optimizer: true or offload_master: true"
"""The remedy that makes the host hold values that the update uses."""
