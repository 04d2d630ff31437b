"""Keys and names of other trainers: Hugging Face's Trainer and TRL, axolotl, Unsloth, LLaMA-Factory, torchtune."""

from __future__ import annotations

from functools import cache

from .tables import read_table


@cache
def _table() -> dict[str, dict[str, str]]:
    """Return the table of `foreign.toml`, read when the first unknown key or name needs it."""
    raw = read_table("foreign.toml")
    hints = {key: hint["do"] for hint in raw["hints"] for key in hint["keys"]}
    names = {kind: dict(rows) for kind, rows in raw["names"].items()}
    return {"same": _inverted(raw["same"]), "entries": _inverted(raw["entries"]), "hints": hints, **names}


def _inverted(table: dict[str, list[str]]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names}


def same_keys() -> dict[str, str]:
    """Return {folded key of another trainer: our key of the same meaning}."""
    return _table()["same"]


def same_entry_keys() -> dict[str, str]:
    """Return {folded key of a dataset entry elsewhere: the key of an entry here}."""
    return _table()["entries"]


def key_hints() -> dict[str, str]:
    """Return {folded key of another trainer: what to do here}, for keys that have no equivalent."""
    return _table()["hints"]


def name_hints(kind: str) -> dict[str, str]:
    """Return {folded name of a plugin elsewhere: what to write here} for a kind of plugin."""
    return _table().get(kind, {})
