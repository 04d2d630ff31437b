"""The key `alerts`: what a run tells a webhook. Its address may be a secret, so no error and no output shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from surogate_core.errors import ConfigError

from .errors import SECRET, Problem, validate

URL_VARIABLE: Final = "SUROGATE_ALERT_URL"
Event = Literal["nan", "spike", "stall", "failed", "done"]


class Alerts(BaseModel):
    """The settings of alerts: events that are told, and from when on.

    spike_deviations  a loss is a spike that many deviations (1.4826 x median absolute deviation) above the median of
                      the 50 steps before
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = None
    events: tuple[Event, ...] = ("nan", "spike", "stall", "failed")
    spike_deviations: float = Field(10.0, gt=0, le=1e6)
    stall_seconds: float = Field(600.0, gt=0, le=1e9)

    def address(self) -> str:
        """Return the address, of the config or the environment. Raises ConfigError, which does not show it."""
        address = self.url or os.environ.get(URL_VARIABLE, "")
        if not address:
            raise ConfigError(f"alerts: no address. Set alerts.url, or the variable {URL_VARIABLE}.")
        if not _is_address(address):
            raise ConfigError(f"{URL_VARIABLE}: {_WRONG}")
        return address


_WRONG = "must be an address that begins with https:// or http:// (it is not shown, because it may be a secret)"


def parse_alerts(value: Any) -> Any:
    """Accept a mapping. Another value is not shown: it may be the address."""
    if value is None or isinstance(value, Mapping):
        return value
    raise PydanticCustomError(
        SECRET, "must be a mapping, such as {url: https://host/path, events: [nan, spike, stall]}"
    )


def alerts_of(given: Mapping[str, Any]) -> tuple[Alerts | None, list[Problem]]:
    """Return the settings, or None and what is wrong with them."""
    url = given.get("url")
    if url is not None and not (isinstance(url, str) and _is_address(url)):
        return None, [Problem("alerts.url", _WRONG)]
    words = given.get("events")
    listed = {**given, "events": [words]} if isinstance(words, str) else given
    return validate(Alerts, listed, within="alerts.")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and text.isprintable() and " " not in text
    except ValueError:
        return False
