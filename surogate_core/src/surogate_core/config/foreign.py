"""Keys and names of other trainers: Hugging Face's Trainer and TRL, axolotl, Unsloth, LLaMA-Factory, torchtune."""

from __future__ import annotations

from functools import cache

from .keys import read_table


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
