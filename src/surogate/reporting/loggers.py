"""The loggers of a run: opens them, and keeps one that fails from ending the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from surogate_core.api import Logger, LoggerDef, Report, RunInfo
from surogate_core.errors import PluginError, RunStopped, described
from surogate_core.plugins.provided import Provided
from surogate_core.plugins.registry import Registry

from ..config.load import LoadedConfig

Notice = Callable[[str], None]


class Loggers:
    """The open loggers of a run. `status` ("done", "interrupted" or "failed") is what they are closed with."""

    def __init__(self) -> None:
        self.opened: list[Logger] = []
        self.status = "failed"

    def report(self, report: Report) -> None:
        for logger in self.opened:
            logger.report(report)

    def close(self) -> None:
        """Close all loggers with `status`, even if one raises."""
        with ExitStack() as stack:
            for logger in reversed(self.opened):
                stack.callback(logger.close, self.status)


def open_loggers(loaded: LoadedConfig, registry: Registry, info: RunInfo, notice: Notice) -> Iterator[Logger]:
    """Open core's own loggers and those that `report_to` names, one at a time.

    Raises ConfigError for what the user has to change, and PluginError for a logger that fails for another reason.
    """
    for name in registry.names("logger"):
        source = registry.source("logger", name)
        definition: LoggerDef = source.definition
        if definition.always and definition.origin is None:
            yield definition.open(info, loaded.options.get(("logger", name), definition.options()))
        elif definition.always or name in loaded.config.report_to:
            yield GuardedLogger(source, _open(source, loaded, info), notice)


def _open(source: Provided, loaded: LoadedConfig, info: RunInfo) -> Logger:
    definition: LoggerDef = source.definition
    options = loaded.options.get(("logger", source.name))
    try:
        return definition.open(info, options if options is not None else definition.options())
    except PluginError as error:
        remedy = (
            f"Set SUROGATE_PLUGINS=-{source.plugin.distribution}" if definition.always else "Remove it from report_to"
        )
        raise PluginError(f"{error}. {remedy} to train without it.") from error.__cause__


class GuardedLogger:
    """A plugin's logger. If it fails after it was opened, the user gets a notice and the run continues without it.

    A failing network of a tracker must not end a run of days, and metrics.jsonl has every report.
    """

    def __init__(self, source: Provided, logger: Logger, notice: Notice) -> None:
        self._name = f"{source.name} of {source.plugin}"
        self._logger: Logger | None = logger
        self._notice = notice

    def report(self, report: Report) -> None:
        self._guarded(lambda logger: logger.report(report))

    def close(self, status: str) -> None:
        self._guarded(lambda logger: logger.close(status))

    def _guarded(self, call: Callable[[Logger], None]) -> None:
        if self._logger is None:
            return
        try:
            call(self._logger)
        except RunStopped:
            raise
        except (Exception, SystemExit) as error:
            self._logger = None
            self._notice(
                f"logger {self._name} failed and gets no more reports: {described(error)}. "
                "The run continues; metrics.jsonl has all reports."
            )
