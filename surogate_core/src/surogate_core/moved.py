"""The program, under the names that it had in core until 0.2. They go with 0.4."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from .errors import ConfigError


def program(module: str, old: str) -> ModuleType:
    """Return a module of the package `surogate`. `old`: the name that was used. Raises ConfigError without it."""
    warnings.warn(f"{old} is {module} since 0.3, and goes with 0.4", DeprecationWarning, stacklevel=3)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "surogate":
            raise
        raise ConfigError(f"{old} is {module} since 0.3, of another package: pip install surogate") from None
