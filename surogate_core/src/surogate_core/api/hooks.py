"""Hooks that return definitions which exist when a plugin is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pluggy

hookimpl = pluggy.HookimplMarker("surogate")


def provides(definitions: Iterable[Any]) -> Callable[[], Iterable[Any]]:
    """Return a hook that returns `definitions`."""
    return hookimpl(lambda: definitions)
