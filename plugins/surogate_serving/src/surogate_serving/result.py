"""The result of a check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """The result of a check.

    check   its name: tokens, log_probs, stops or adapter
    equal   whether what is served is what was trained
    said    a sentence with the numbers
    fault   a word for what is wrong, "" if nothing is
    remedy  what to do
    shown   lines of an example
    numbers for --json
    """

    check: str
    equal: bool
    said: str
    fault: str = ""
    remedy: str = ""
    shown: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
