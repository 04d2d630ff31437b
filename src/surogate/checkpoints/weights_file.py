"""A safetensors file of a model: opened, with errors that name it. Pickled files are never opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from surogate_core.api.regular_file import refuse_special
from surogate_core.errors import ConfigError

LOADABLE = {"F64", "F32", "F16", "BF16"}
"""Dtypes of tensors that are read as they stand."""

AGAIN = "Download the checkpoint again."


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    refuse_special(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ConfigError(f"{path}: is truncated or corrupt ({error}). {AGAIN}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
