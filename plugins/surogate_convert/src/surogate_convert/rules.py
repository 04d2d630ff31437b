"""The mapping of a tool: what becomes of each of its keys.

A table has:

title, reads    the name of the tool, and what files of it can be converted
signs           keys or words that only this tool has
[defaults]      our key -> the value that the tool has if its own key is absent
[adapter]       the same, for runs that train LoRA
[keys]          their key -> a rule:
    to          our key of the same meaning
    values      their value, in lower case -> ours, or the keys that it sets
    sets        keys that are set if the value is true
    only        fraction (below 1) or count (whole): other values have no counterpart
    says        how the meaning differs
    unneeded    why nothing has to be set
    missing     what is lost, and what to do
    by          what code of `entries.py` or `convert.py` makes of it, in words
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TOOLS = ("axolotl", "trl", "llamafactory", "unsloth")


@dataclass(frozen=True)
class Rule:
    """The fate of a key; see the module."""

    to: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    only: str = ""
    says: str = ""
    unneeded: str = ""
    missing: str = ""
    by: str = ""


@dataclass(frozen=True)
class Tool:
    """The table of a tool."""

    name: str
    title: str
    reads: str
    signs: Sequence[str]
    keys: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    adapter: Mapping[str, Any]


@cache
def tool(name: str) -> Tool:
    """Return the table of a tool."""
    text = (Path(__file__).parent / "tables" / f"{name}.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    keys = {key: Rule(**({"to": rule} if isinstance(rule, str) else rule)) for key, rule in table["keys"].items()}
    for rows, kind in ((table.get("unneeded", {}), "unneeded"), (table.get("missing", {}), "missing")):
        keys |= {key: Rule(**{kind: said}) for said, names in rows.items() for key in names}
    return Tool(name, table["title"], table["reads"], table["signs"], keys, table["defaults"], table.get("adapter", {}))
