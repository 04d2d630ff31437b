"""Values that the keys of a file ask for, by key of ours. The order of a file never decides between two that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.api import ConfigError

from .leaves import Leaf


@dataclass(frozen=True)
class Wish:
    """A value for one of our keys.

    leaves   what of the file asks for it; none: what follows from the kind of the file
    weak     whether it is the tool's own default, which yields to what was chosen
    yields   keys of the tool that decide instead, if they ask for the same key of ours
    """

    value: Any
    leaves: Sequence[Leaf] = ()
    weak: bool = False
    yields: Sequence[str] = ()

    @property
    def name(self) -> str:
        return ", ".join(leaf.name for leaf in self.leaves)

    def shown(self) -> str:
        line = next((leaf.line for leaf in self.leaves if leaf.line), None)
        said = ", ".join(f"{leaf.name}: {leaf.value}" for leaf in self.leaves) or "the file without it"
        return f"{said} (line {line})" if line else said


class Settings:
    """The wishes for each of our keys."""

    def __init__(self) -> None:
        self._wishes: dict[str, list[Wish]] = {}

    def ask(self, key: str, wish: Wish) -> None:
        self._wishes.setdefault(key, []).append(wish)

    def drop(self, key: str) -> Sequence[Wish]:
        """Forget a key and return what asked for it."""
        return self._wishes.pop(key, [])

    def __contains__(self, key: str) -> bool:
        return key in self._wishes

    def __iter__(self) -> Iterator[str]:
        return iter([*self._wishes])

    def value(self, key: str, otherwise: Any = None) -> Any:
        """Return what is asked for. Raises ConfigError if two keys that were chosen ask for different values."""
        wishes = self._wishes.get(key)
        return decided(key, wishes).value if wishes else otherwise

    def values(self) -> dict[str, Any]:
        return {key: self.value(key) for key in self._wishes}

    def outvoted(self) -> Iterator[tuple[Wish, str, Wish]]:
        """Yield (a wish that another one overrules, our key, the other wish)."""
        for key, wishes in self._wishes.items():
            winner = decided(key, wishes)
            yield from ((w, key, winner) for w in wishes if w.value != winner.value and not w.weak)


def decided(key: str, wishes: Sequence[Wish]) -> Wish:
    """Return the wish that decides: of equal ones any, of others one that is no default and does not yield."""
    chosen = [wish for wish in wishes if not wish.weak] or [*wishes]
    names = {leaf.name for wish in chosen for leaf in wish.leaves}
    strong = [wish for wish in chosen if not names & {*wish.yields}] or chosen
    if any(wish.value != strong[0].value for wish in strong):
        asked = "; ".join(dict.fromkeys(f"{wish.shown()} asks for {wish.value!r}" for wish in strong))
        raise ConfigError(f"{key}: {asked}. Which is meant cannot be seen from the file. Keep one of them.")
    return strong[0]
