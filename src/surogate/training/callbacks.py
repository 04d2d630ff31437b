"""Callbacks of a script. A function sees the reports of a run; a `Callback` has the run in hand between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from surogate_core.api import EvalReport, Logger, Report, StepReport
from surogate_core.errors import ConfigError, PluginError, RunStopped, SurogateError, described

from .interrupt import STOPPED

if TYPE_CHECKING:
    from .active_run import ActiveRun

Stops = bool | None
ReportCallback = Callable[[StepReport | EvalReport], Stops]
"""Called with the report of each step and of each evaluation. True: the run finishes early."""


class CallbackError(RunStopped):
    """A callback raised, or did what it may not do. The run is saved. `__cause__`: what it raised, if it did."""


@runtime_checkable
class Callback(Protocol):
    """A callback that is called between two steps. `every` makes one of a function."""

    def due(self, step: int) -> bool:
        """Return whether it is called after `step`, the first of which is 1. Asked once after every step."""

    def __call__(self, run: ActiveRun) -> Stops:
        """Do something with the run. True: it finishes early."""


@dataclass(frozen=True)
class Every:
    """Calls a function after every `steps` steps."""

    function: Callable[[ActiveRun], Stops]
    steps: int

    @property
    def __name__(self) -> str:
        return name_of(self.function)

    def due(self, step: int) -> bool:
        return step % self.steps == 0

    def __call__(self, run: ActiveRun) -> Stops:
        return self.function(run)


def every(steps: int) -> Callable[[Callable[[ActiveRun], Stops]], Every]:
    """Decorate a function of an `ActiveRun`: a callback of `train` that is called after every `steps` steps.

    Raises ConfigError for a number of steps that is none.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"every: {steps!r} is no number of steps. Use 1 or more.")
    return lambda function: Every(function, steps)


def name_of(callback: object) -> str:
    return str(getattr(callback, "__name__", type(callback).__name__))


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run, in their order. Raises ConfigError for what cannot be called."""

    given: Sequence[ReportCallback | Callback] = ()
    between: Sequence[Callback] = field(init=False)
    """Those that have the run in hand."""

    def __post_init__(self) -> None:
        for callback in self.given:
            if not callable(callback) or isinstance(callback, type):
                raise ConfigError(
                    f"callback {name_of(callback)}: is {type(callback).__name__}, which cannot be called. Give a "
                    "function of a report, or an object that surogate.every makes."
                )
        object.__setattr__(self, "between", [one for one in self.given if isinstance(one, Callback)])

    def refuse_several(self, processes: int) -> None:
        """Raise ConfigError if a callback has a run in hand that several processes train."""
        if self.between and processes > 1:
            raise ConfigError(
                f"callback {name_of(self.between[0])}: has the run in hand, and {processes} processes train this run: "
                "each has a part of it. Train in one process, or give a function of reports."
            )

    def logger(self, stop: Callable[[str], None]) -> Logger:
        """Return what calls the functions of reports. stop: called with the reason if one returns True."""
        return _Listener([one for one in self.given if not isinstance(one, Callback)], stop)


@dataclass(frozen=True)
class _Listener(Logger):
    functions: Sequence[ReportCallback]
    stop: Callable[[str], None]

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport | EvalReport):
            for function in self.functions:
                with naming(function, report.step):
                    if stops(function(report)):
                        self.stop(f"callback {name_of(function)}: {STOPPED}")


def stops(returned: Any) -> bool:
    """Return what a callback returned. Raises ConfigError for what is neither a truth value nor nothing."""
    if returned is None or type(returned).__name__ in ("bool", "bool_"):  # of Python and of numpy
        return bool(returned)
    raise ConfigError(f"returned {str(returned)[:40]!r}. Return True to finish the run, False or nothing to go on")


@contextmanager
def naming(callback: object, step: int) -> Iterator[None]:
    """Turn what a callback raises into an error that names it. What the run itself raises is not the callback's."""
    try:
        yield
    except (RunStopped, PluginError):
        raise
    except Exception as error:
        what = str(error).rstrip(".") if isinstance(error, SurogateError) else f"raised {described(error)}"
        raise CallbackError(
            f"callback {name_of(callback)}, after step {step:,}: {what}. The run is saved: mend the callback, and "
            "resume it (resume_from_checkpoint=True)."
        ) from error
