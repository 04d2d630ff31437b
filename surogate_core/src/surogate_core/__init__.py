"""Surogate's core: programs, memory plans, plugins, the training step. Imports no plugin and, here, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .definitions import Definitions
    from .engine import Trained, train_from

__all__ = ["Definitions", "Trained", "__version__", "train_from"]

_HOMES = {"Definitions": "definitions", "Trained": "engine", "train_from": "engine"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: commands that plan need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .machine.spinning import spin_shortly

    spin_shortly()  # before the import of torch
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
