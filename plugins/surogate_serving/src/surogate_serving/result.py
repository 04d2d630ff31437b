"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """The result of a check.

    check   its name: tokens, log_probs, stops or adapter
    equal   whether what is served is what was trained; None: the check was not made, and `said` tells why
    said    a sentence with the numbers
    fault   a word for what is wrong, "" if nothing is
    remedy  what to do
    shown   lines of an example
    picture lines of a picture of the numbers
    numbers for --json
    """

    check: str
    equal: bool | None
    said: str
    fault: str = ""
    remedy: str = ""
    shown: tuple[str, ...] = ()
    picture: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
