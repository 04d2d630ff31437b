"""PEFT's rules that find modules by their names in a config: each key has a rule of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from surogate_core.api import check_pattern, match_groups, matches_whole

PLAIN = re.compile(r"\w+")
"""A pattern that stands for itself, as most do."""

T = TypeVar("T")


def is_target(module: str, target: str) -> bool:
    """`target_modules`: the whole name, or its end from a dot on."""
    return module == target or module.endswith(f".{target}")


def is_saved(module: str, name: str) -> bool:
    """`modules_to_save`: any end of the name, so that `norm` is `input_layernorm` too."""
    return module.endswith(name)


def pattern_of(patterns: Iterable[str], module: str) -> str | None:
    """`rank_pattern`, `alpha_pattern`: the first regular expression for the whole name or its end from a dot on."""
    return next((pattern for pattern in patterns if _fits(pattern, module)), None)


def _fits(pattern: str, module: str) -> bool:
    if PLAIN.fullmatch(pattern):
        return is_target(module, pattern)  # what the expression says, without a dot or another character of its own
    return match_groups(_whole(pattern), module) is not None


def check(pattern: str) -> None:
    """Raises re.error for a pattern of which PEFT makes no expression."""
    check_pattern(_whole(pattern))


def _whole(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def of_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that fits a module."""
    pattern = pattern_of(patterns, module)
    return default if pattern is None else patterns[pattern]


@dataclass(frozen=True)
class Selection:
    """The linear modules that a saved adapter is of, by the fields of PEFT's config.

    target_modules, exclude_modules: ends of names, or one regular expression for the whole name; "all-linear" is every
    linear module but the head. layers_to_transform: the blocks that are meant, all of them where it is empty;
    layers_pattern: what the list of blocks is called. modules_to_save: modules without an adapter, and all below them.
    by_weight: modules that `target_parameters` names by their weights, which PEFT adapts whatever the other fields say.
    """

    target_modules: str | Sequence[str] = ()
    exclude_modules: str | Sequence[str] = ()
    layers_to_transform: int | Sequence[int] = ()
    layers_pattern: str | Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    by_weight: Sequence[str] = ()

    def has(self, module: str, head: str) -> bool:
        """Whether the adapter is of `module`. `head`: the name of the LM head. Raises re.error for a bad pattern."""
        if any(is_target(module, name) for name in self.by_weight):
            return True
        if self.exclude_modules and _is_named(module, self.exclude_modules):
            return False
        if any(_is_below(module, name) for name in self.modules_to_save):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == "all-linear":
                return module != head
            return _is_named(module, self.target_modules)
        return _is_named(module, self.target_modules) and self._is_of_its_layers(module)

    def _is_of_its_layers(self, module: str) -> bool:
        layers = self.layers_to_transform
        wanted = [layers] if isinstance(layers, int) else list(layers)
        if not wanted:
            return True
        names = [self.layers_pattern] if isinstance(self.layers_pattern, str) else list(self.layers_pattern)
        named = {name: rf"(?:^|.*?\.){name}\.(?P<index>\d+)\." for name in names if name}
        patterns = named or {"": r".*?\.[^.]*\.(?P<index>\d+)\."}
        matching = (_index(pattern, module, is_plain=_is_plain(name)) for name, pattern in patterns.items())
        found = next(filter(None, matching), None)
        return found is not None and int(found["index"]) in wanted


def _is_plain(name: str) -> bool:
    return not name or PLAIN.fullmatch(name) is not None


def _index(pattern: str, module: str, *, is_plain: bool) -> Mapping[str, str] | None:
    if not is_plain:
        return match_groups(pattern, module)
    found = re.match(pattern, module)
    return None if found is None else found.groupdict()


def _is_below(module: str, name: str) -> bool:
    if PLAIN.fullmatch(name):
        return f".{name}." in f".{module}."
    return match_groups(rf"(^|.*\.){name}($|\..*)", module) is not None


def _is_named(module: str, names: str | Sequence[str]) -> bool:
    if isinstance(names, str):
        return matches_whole(names, module)
    return any(is_target(module, name) for name in names)
