"""How PEFT finds modules by what a config calls them: three keys, three rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    """What the first fitting pattern says of a module."""
    pattern = pattern_of(patterns, module)
    return default if pattern is None else patterns[pattern]
