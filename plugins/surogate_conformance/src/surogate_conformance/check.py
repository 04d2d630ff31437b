"""Checks: a check is a function whose name is the sentence that it proves of a definition."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from surogate_core.errors import SurogateError, described

State = Literal["passed", "failed", "not applicable"]


class NotApplicable(Exception):
    """A check does not concern a definition. The message says why."""


@dataclass(frozen=True)
class Check:
    """A claim about every definition of some kinds.

    function  (definition, bench) -> remarks, or None. Raises AssertionError, or an error of Surogate, if the claim does
              not hold, and NotApplicable.
    remedy    what to do if what the function asserts does not hold; not shown for other errors, which say it themselves
    """

    kinds: tuple[str, ...]
    function: Callable[[Any, Any], list[str] | None]
    remedy: str

    @property
    def sentence(self) -> str:
        return self.function.__name__.replace("_", " ")


OWN = ("surogate_conformance.", "surogate_core.testing.")
"""Modules whose assertions are those of a check. Others are of the plugin or of a library."""

CHECKS: list[Check] = []
"""Every check, in the order in which they run."""


def proves(*kinds: str, remedy: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a check of all definitions of these kinds."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        CHECKS.append(Check(kinds, function, remedy))
        return function

    return register


@dataclass(frozen=True)
class Result:
    """The outcome of a check. reason: why it failed or does not apply. warnings: remarks, which fail nothing."""

    what: str
    sentence: str
    state: State
    reason: str = ""
    remedy: str = ""
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        line = f"{self.what}: {self.sentence}"
        if self.state == "failed":
            return f"{line}: {self.reason}. {self.remedy}".rstrip()
        return f"{line}: {self.reason}" if self.reason else line


@dataclass(frozen=True)
class Case:
    """A check of one definition."""

    what: str
    check: Check
    definition: Any
    bench: Any

    def __str__(self) -> str:
        return f"{self.what}: {self.check.sentence}"

    def run(self) -> Result:
        """Return the result. An exception of the definition, of any type, is a failure.

        With SUROGATE_TRACEBACK=1 the traceback of one that is no failed comparison is printed.
        """
        try:
            warnings = self.check.function(self.definition, self.bench) or []
        except NotApplicable as why:
            return Result(self.what, self.check.sentence, "not applicable", str(why))
        except SurogateError as error:
            return self._failed(" ".join(str(error).split()), "")
        except (Exception, SystemExit) as error:
            raised = _innermost(error)
            if isinstance(error, AssertionError) and raised.tb_frame.f_globals["__name__"].startswith(OWN):
                return self._failed(" ".join(str(error).split()), self.check.remedy)
            if os.environ.get("SUROGATE_TRACEBACK", "0") not in ("", "0"):
                traceback.print_exception(error)
            return self._failed(f"{described(error)} ({raised.tb_frame.f_code.co_filename}:{raised.tb_lineno})", "")
        return Result(self.what, self.check.sentence, "passed", warnings=warnings)

    def _failed(self, reason: str, remedy: str) -> Result:
        reason = reason or "the check failed without a message"
        return Result(self.what, self.check.sentence, "failed", reason.rstrip("."), remedy)


def _innermost(error: BaseException) -> TracebackType:
    """Return the innermost part of a traceback, where the error was raised."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def variants(bench: Any, definition: Any, default: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the keys of runs that a definition is tested in: its examples, or `default`."""
    yield from bench.subject.examples(definition) or default
