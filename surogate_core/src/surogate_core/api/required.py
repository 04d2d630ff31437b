"""Libraries that packages require and core does without, imported where they are called."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import PluginError


def required(module: str, by: str) -> ModuleType:
    """Return a module. Raises PluginError, which names `by`, a module of core, and the library if that is missing."""
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise PluginError(
            f"{by} needs {library}, which is not installed: pip install {library}. A package that uses {by} names "
            f"{library} among its requirements."
        ) from None
