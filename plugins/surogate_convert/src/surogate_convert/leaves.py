"""The leaves of a file: every value that it sets, each with its place. Each is settled once, or named as unknown.

A leaf is a value that holds no mapping: a number, a word, a list of words, an empty mapping. What a conversion does not
settle is left over and reported, so nothing can be dropped without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from surogate_core.api import ConfigError

Fate = Literal["converted", "missing", "unneeded"]

Place = tuple[str, ...]


@dataclass(eq=False)
class Leaf:
    """A value of a file.

    place    keys from the outside to it; a place in a list is its number
    line     of a script or a command
    owner    the call or the tree that it belongs to: leaves of one mapping have one owner
    code     whether value is the text of an expression that a script computes
    table    the table of rules for it: that of the tool, or `calls` or `launchers`
    fate     what became of it, and said why
    """

    place: Place
    value: Any
    line: int | None = None
    owner: int = 0
    code: bool = False
    table: str = ""
    fate: Fate | None = None
    said: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return ".".join(self.place)

    def settle(self, fate: Fate, said: str = "") -> None:
        """Say what becomes of it. What is lost in part is missing, whatever else is said of it."""
        if self.fate != "missing" or fate == "missing":
            self.said = [*self.said, said] if fate == self.fate else [said]
            self.fate = fate


def leaves_of(tree: Any, place: Place = (), line: int | None = None, owner: int = 0, table: str = "") -> Iterator[Leaf]:
    """Yield the leaves of nested mappings and lists."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves_of(value, (*place, str(key)), line, owner, table)
    elif isinstance(tree, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in tree):
        for number, value in enumerate(tree):
            yield from leaves_of(value, (*place, str(number)), line, owner, table)
    else:
        yield Leaf(place, tree, line, owner, table=table)


def tree_of(leaves: Sequence[Leaf], depth: int) -> Any:
    """Return the value at a place from its leaves: the inverse of `leaves_of`. depth: the length of the place."""
    if len(leaves) == 1 and len(leaves[0].place) == depth:
        return leaves[0].value
    below: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        below.setdefault(leaf.place[depth], []).append(leaf)
    values = {key: tree_of(found, depth + 1) for key, found in below.items()}
    return [*values.values()] if all(key.isdecimal() for key in values) else values


class Node:
    """The leaves below a place, of which a conversion takes what it reads. What it takes counts as converted."""

    def __init__(self, leaves: Iterable[Leaf], place: Place = ()) -> None:
        self.leaves = [leaf for leaf in leaves if leaf.place[: len(place)] == place and not leaf.table]
        self.place = place

    def open(self, key: str = "") -> list[Leaf]:
        """Return the leaves at or below `key` that are not settled."""
        place = (*self.place, key) if key else self.place
        return [leaf for leaf in self.leaves if leaf.fate is None and leaf.place[: len(place)] == place]

    def __contains__(self, key: str) -> bool:
        return bool(self.open(key))

    def below(self, key: str) -> Node:
        return Node(self.leaves, (*self.place, key))

    def items(self) -> list[Node]:
        """Return the members of a list of mappings, or a mapping of them."""
        depth = len(self.place)
        return [
            self.below(key)
            for key in dict.fromkeys(leaf.place[depth] for leaf in self.open() if len(leaf.place) > depth)
        ]

    def look(self, key: str) -> Any:
        """Return the value of `key`, None if there is none, or a script computes it.

        Raises ConfigError if it is given twice, unequal.
        """
        found = [leaf for leaf in self.open(key) if not leaf.code]
        by_owner: dict[int, list[Leaf]] = {}
        for leaf in found:
            by_owner.setdefault(leaf.owner, []).append(leaf)
        values = [tree_of(leaves, len(self.place) + 1) for leaves in by_owner.values()]
        for value in values[1:]:
            if value != values[0]:
                lines = ", ".join(str(leaf.line) for leaf in found if leaf.line)
                where = f" (lines {lines})" if lines else ""
                raise ConfigError(f"{found[0].name}: is given as {values[0]!r} and as {value!r}{where}. Keep one.")
        return values[0] if values else None

    def take(self, key: str) -> Any:
        """Return the value of `key`, as `look` does, and settle its leaves."""
        value = self.look(key)
        for leaf in self.open(key):
            if not leaf.code:
                leaf.settle("converted")
        return value

    def settle(self, key: str, fate: Fate, said: str) -> None:
        for leaf in self.open(key):
            leaf.settle(fate, said)
