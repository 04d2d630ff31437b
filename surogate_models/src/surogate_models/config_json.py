"""Values of a parsed `config.json`, checked: a ConfigError says "key: what is wrong (got value)"."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from surogate_core.errors import ConfigError

LARGEST = 2**31 - 1
"""Token ids and positions are int32."""


def wrong(key: str, expected: str, value: object) -> ConfigError:
    """The error to raise for a value that is there and is not right."""
    text = repr(value)
    return ConfigError(f"{key}: {expected} (got {text if len(text) <= 80 else text[:77] + '...'})")


def integer(
    config: Mapping[str, Any], key: str, *, default: int | None = None, most: int = LARGEST, within: str = ""
) -> int:
    """A whole number from 1 to `most`; a missing key is an error without a default. `within`: of what mapping."""
    value = _given(config, key, default, within)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise wrong(within + key, f"must be a whole number from 1 to {most}", value)
    return value


def positive(config: Mapping[str, Any], key: str, *, default: float | None = None, within: str = "") -> float:
    """A finite number above 0; a missing key is an error without a default. `within`: of what mapping."""
    value = _given(config, key, default, within)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(within + key, "must be a positive number", value)
    if not value < 1e300 or not isfinite(value) or value <= 0:
        raise wrong(within + key, "must be a positive number", value)
    return float(value)


def boolean(config: Mapping[str, Any], key: str, *, default: bool = False, within: str = "") -> bool:
    """True or false; the default where the key is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(within + key, "must be true or false", value)
    return default if value is None else value


def is_given(config: Mapping[str, Any], key: str) -> bool:
    """Whether the key is there with a value that is not null."""
    return config.get(key) is not None


def _given(config: Mapping[str, Any], key: str, default: float | None, within: str) -> Any:
    if key not in config and default is None:
        raise ConfigError(f"{within}{key}: is required")
    return config.get(key, default)
