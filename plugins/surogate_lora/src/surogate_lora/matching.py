"""PEFT's rules that find modules by their names in a config: each key has a rule of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def is_target(module: str, target: str) -> bool:
    """`target_modules`: the whole name, or its end from a dot on."""
    return module == target or module.endswith(f".{target}")


def is_saved(module: str, name: str) -> bool:
    """`modules_to_save`: any end of the name, so that `norm` is `input_layernorm` too."""
    return module.endswith(name)


def pattern_of(patterns: Iterable[str], module: str) -> str | None:
    """`rank_pattern`, `alpha_pattern`: the first regular expression for the whole name or its end from a dot on."""
    return next((pattern for pattern in patterns if compiled(pattern).match(module)), None)


def compiled(pattern: str) -> re.Pattern[str]:
    """The expression that PEFT makes of a pattern. Raises re.error where there is none."""
    return re.compile(rf"(.*\.)?({pattern})$")


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
        if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save):
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
        patterns = [rf"(?:^|.*?\.){name}\.(?P<index>\d+)\." for name in names if name] or [
            r".*?\.[^.]*\.(?P<index>\d+)\."
        ]
        found = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found["index"]) in wanted


def _is_named(module: str, names: str | Sequence[str]) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(is_target(module, name) for name in names)
