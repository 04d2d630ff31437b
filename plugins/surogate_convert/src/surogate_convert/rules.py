"""The mapping of a tool: what becomes of each of its keys.

A table has:

title, reads    the name of the tool, and what files of it can be converted
signs           keys or words that only this tool has
based_on        tables whose keys and defaults the tool has too, if its own do not say otherwise
[defaults]      our key -> the value that the tool has if its own key is absent, or {value, says}
[adapter]       the same, for runs that train LoRA
[script]        the same, for scripts; [script_adapter] for scripts that train LoRA
[losses.NAME]   the same, for runs with this loss
[keys]          their key -> a rule. A dotted key is one of a nested table; a rule of a table holds for all below it.
    to          our key of the same meaning; {loss} stands for the loss of the run
    values      their value, in lower case -> ours, or the keys that it sets
    sets        keys that are set if the value is true
    only        fraction (below 1), count (whole), steps (either) or amount (above 0): others have no counterpart
    whole       whether a mapping is taken as it is
    says        how the meaning differs
    default     the tool's own default: with it the key asks for nothing, and yields to others that set the same key
    yields      keys of the tool that decide instead if they set the same key of ours
    unneeded    why nothing has to be set
    missing     what is lost, and what to do: for all values, or those that `values` does not have
    refused     why the file is not converted: for all values, or those that `values` does not have
    by          what code of `entries.py` or `convert.py` makes of it, in words
[preference]    rules that differ if the run compares answers
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TOOLS = ("axolotl", "trl", "llamafactory", "unsloth")

UNSET = object()
"""The default of a key of which none is known."""


@dataclass(frozen=True)
class Rule:
    """The fate of a key; see the module."""

    to: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    only: str = ""
    whole: bool = False
    says: str = ""
    default: Any = UNSET
    yields: Sequence[str] = ()
    unneeded: str = ""
    missing: str = ""
    refused: str = ""
    by: str = ""


@dataclass(frozen=True)
class Tool:
    """The table of a tool. Its defaults are (value, how it differs)."""

    name: str
    title: str
    reads: str
    signs: Sequence[str]
    keys: Mapping[str, Rule]
    preference: Mapping[str, Rule]
    defaults: Mapping[str, tuple[Any, str]]
    adapter: Mapping[str, tuple[Any, str]]
    script: Mapping[str, tuple[Any, str]]
    script_adapter: Mapping[str, tuple[Any, str]]
    losses: Mapping[str, Mapping[str, tuple[Any, str]]]


def read_table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "tables" / f"{name}.toml").read_text(encoding="utf-8"))


def rules_of(table: Mapping[str, Any]) -> dict[str, Rule]:
    """Return the rules of a table by key."""
    keys = {key: _rule(rule) for key, rule in table["keys"].items()}
    for rows, kind in ((table.get("unneeded", {}), "unneeded"), (table.get("missing", {}), "missing")):
        keys |= {key: Rule(**{kind: said}) for said, names in rows.items() for key in names}
    return keys


@cache
def tool(name: str) -> Tool:
    """Return the table of a tool, with what it is based on."""
    table = read_table(name)
    bases = [read_table(base) for base in table["based_on"]]
    keys: dict[str, Rule] = {}
    defaults: dict[str, tuple[Any, str]] = {}
    for part in (*bases, table):
        keys |= rules_of(part)
        defaults |= _defaults(part.get("defaults", {}))
    return Tool(
        name,
        table["title"],
        table["reads"],
        table["signs"],
        keys,
        {key: _rule(rule) for key, rule in table.get("preference", {}).items()},
        defaults,
        _defaults(table.get("adapter", {})),
        _defaults(table.get("script", {})),
        _defaults(table.get("script_adapter", {})),
        {loss: _defaults(rows) for loss, rows in table.get("losses", {}).items()},
    )


def _rule(row: Any) -> Rule:
    return Rule(**({"to": row} if isinstance(row, str) else row))


def _defaults(rows: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    return {key: (row.get("value"), row["says"]) if isinstance(row, dict) else (row, "") for key, row in rows.items()}
