"""The loggers of a run: opens them, and keeps one that fails from ending the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from surogate_core.api import EndReport, Logger, LoggerDef, Report, RunInfo
from surogate_core.errors import PluginError, RunStopped, described
from surogate_core.plugins.provided import Provided
from surogate_core.plugins.registry import Registry

from ..config.alerts import alerts_of
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

    @contextmanager
    def closing(self, end: Callable[[BaseException], EndReport]) -> Iterator[None]:
        """Close all loggers at the end of the block. If it raises, they get the report `end` of that before."""
        try:
            yield
        except BaseException as error:
            self.end(end(error))
            raise
        finally:
            self.close()

    def end(self, report: EndReport) -> None:
        """Report an error or a signal to all loggers, even if one raises: it may be why the run ends."""
        self.status = report.status
        for logger in self.opened:
            with suppress(Exception):
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
    for source in _selected(loaded, registry):
        definition: LoggerDef = source.definition
        options = _options(source, loaded)
        if definition.always and definition.origin is None:
            yield definition.open(info, options)
            continue
        with _remedy(source):
            logger = definition.open(info, options)
        yield GuardedLogger(source, logger, notice)


def check_loggers(loaded: LoadedConfig, registry: Registry) -> None:
    """Raise ConfigError for settings with which a logger of the run, or its alerts, cannot be opened."""
    for source in _selected(loaded, registry):
        with _remedy(source):
            source.definition.check(Path(loaded.config.output_dir), _options(source, loaded))
    if loaded.config.alerts is not None:
        settings, _ = alerts_of(loaded.config.alerts)  # checked with the config
        assert settings is not None
        settings.address()


def _selected(loaded: LoadedConfig, registry: Registry) -> Iterator[Provided]:
    for name in registry.names("logger"):
        source = registry.source("logger", name)
        if source.definition.always or name in loaded.config.report_to:
            yield source


def _options(source: Provided, loaded: LoadedConfig) -> Any:
    options = loaded.options.get(("logger", source.name))
    return source.definition.options() if options is None else options


@contextmanager
def _remedy(source: Provided) -> Iterator[None]:
    """Say with which setting a run trains without a logger that fails."""
    try:
        yield
    except PluginError as error:
        always = source.definition.always
        remedy = f"Set SUROGATE_PLUGINS=-{source.plugin.distribution}" if always else "Remove it from report_to"
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
