"""Hooks that return definitions which exist when a plugin is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pluggy

hookimpl = pluggy.HookimplMarker("surogate")
Provided = TypeVar("Provided")


def provides(definitions: Iterable[Provided]) -> Callable[[], Iterable[Provided]]:
    """Return a hook that returns `definitions`."""

    @hookimpl
    def hook() -> Iterable[Provided]:
        return definitions

    return hook
