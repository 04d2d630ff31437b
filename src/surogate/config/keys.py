"""Keys and names that core knows but does not serve: not built, never read, of another package, or another trainer's.

The tables are in `original.toml`, those of other trainers in `foreign.toml`: Hugging Face's Trainer and TRL, axolotl,
Unsloth, LLaMA-Factory, torchtune. In core, only they, this file and `schema.py` may name the things of plugins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from surogate_core.words import fold

from .errors import FLAG_WORDS


@dataclass(frozen=True)
class Unread:
    """A key that nothing reads. accepted: values, besides null, that change nothing; others are refused.

    feature       what it is for, if that may be built; accepted[0] is then its default
    matters_with  if this key is set too, only the default is accepted
    """

    instead: str
    accepted: Sequence[Any]
    feature: str = ""
    meaning: str = ""
    matters_with: str = ""

    @property
    def why(self) -> str:
        return f"not yet: {self.feature} is not built" if self.feature else "nothing reads this key"

    def accepts(self, value: Any, given: Collection[str] = ()) -> bool:
        """Return whether `value` has no effect in a config that sets the keys `given`."""
        accepted = self.accepted[:1] if self.matters_with in given else self.accepted
        return any(same_value(value, harmless) for harmless in (None, *accepted))


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

NOT_YET: dict[str, Unread] = {
    row["key"]: Unread(
        group["instead"],
        (row.get("default"), *row.get("inert", ())),
        group["feature"],
        row["meaning"],
        row.get("matters_with", ""),
    )
    for group in _TABLES["not_yet"]
    for row in group["keys"]
}
"""Keys whose feature is not built. A key of a section is dotted."""

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

DEAD: dict[str, Unread] = {key: Unread(**row) for key, row in _TABLES["dead"].items()}
"""Keys of the original that nothing reads here: any value except the original's default is refused."""

MEANS: dict[str, tuple[str, str]] = {key: (row["key"], row["value"]) for key, row in _TABLES["means"].items()}
"""Flag of the original -> the key of TrainConfig and its value that `true` means."""

ALIASES: dict[str, str] = _TABLES["aliases"]
"""Other name of a key -> the key."""

ADAPTER_FLAG = Shorthand("lora", "adapter", "lora", DISTRIBUTIONS["adapter", "lora"], "LoRA")
"""`lora: true` means `adapter: lora`, and `surogate sft` sets it by default. Code of core that needs an adapter's name
takes it from here."""


@cache
def foreign() -> dict[str, dict[str, str]]:
    """Return the tables of `foreign.toml`, read when the first unknown key or name needs them.

    same     {folded key of another trainer: our key of the same meaning}
    entries  {folded key of a dataset entry elsewhere: the key of an entry here}
    hints    {folded key that has no equivalent: what to do here}
    others   by kind of plugin: {folded name elsewhere: what to write here}
    """
    raw = read_table("foreign.toml")
    hints = {key: hint["do"] for hint in raw["hints"] for key in hint["keys"]}
    names = {kind: dict(rows) for kind, rows in raw["names"].items()}
    return {"same": _inverted(raw["same"]), "entries": _inverted(raw["entries"]), "hints": hints, **names}


def _inverted(table: dict[str, list[str]]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names}
