"""Validated access to the values of a parsed `config.json`. Errors read "key: what is wrong (got value)"."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from surogate_core.api import ConfigError

LARGEST = 2**31 - 1
"""Largest integer accepted, because token ids and positions are int32."""


def invalid(key: str, expected: str, value: object) -> ConfigError:
    """Return the ConfigError for an invalid value."""
    text = repr(value)
    return ConfigError(f"{key}: {expected} (got {text if len(text) <= 80 else text[:77] + '...'})")


def read_int(
    config: Mapping[str, Any], key: str, *, default: int | None = None, most: int = LARGEST, within: str = ""
) -> int:
    """Return an integer from 1 to `most`. Raises ConfigError if it is invalid, or missing and there is no default.

    `within` is the prefix of a nested mapping in error messages, such as "rope_scaling.".
    """
    value = _given(config, key, default, within)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise invalid(within + key, f"must be a whole number from 1 to {most}", value)
    return value


def read_positive(config: Mapping[str, Any], key: str, *, default: float | None = None, within: str = "") -> float:
    """Return a finite number greater than 0. Errors and `within` as for `read_int`."""
    value = _given(config, key, default, within)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(within + key, "must be a positive number", value)
    if not value < 1e300 or not isfinite(value) or value <= 0:
        raise invalid(within + key, "must be a positive number", value)
    return float(value)


def read_bool(config: Mapping[str, Any], key: str, *, default: bool = False, within: str = "") -> bool:
    """Return a boolean, or the default if the key is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise invalid(within + key, "must be true or false", value)
    return default if value is None else value


def is_given(config: Mapping[str, Any], key: str) -> bool:
    """Return whether the key is present and not null."""
    return config.get(key) is not None


def _given(config: Mapping[str, Any], key: str, default: float | None, within: str) -> Any:
    if key not in config and default is None:
        raise ConfigError(f"{within}{key}: is required")
    return config.get(key, default)
