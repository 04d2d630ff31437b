"""Problems and notices that accumulate while a config is loaded, so that all of them are reported together."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import Problem


@dataclass
class Findings:
    """The problems and notices that one call of `load_config` found.

    notices: lines to show the user once. failed: keys that already have a problem; validation does not report a
    second one for them.
    """

    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def wrong(self, key: str, text: str) -> None:
        """Record that `key` (dotted inside a section) cannot be used, and why."""
        self.problems.append(Problem(key, text))
        self.failed.add(key)
