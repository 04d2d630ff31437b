"""`surogate.run`, under the name that it had until 0.2."""

from __future__ import annotations

from typing import Any

from .moved import program


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(program("surogate.run", __name__), name)
