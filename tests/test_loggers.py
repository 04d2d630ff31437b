"""Which loggers a run opens, and what happens if one fails."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_metrics import evaluation, info, step

from surogate.config.load import LoadedConfig, load_config
from surogate.reporting.loggers import Loggers, check_loggers, open_loggers
from surogate_core.api import EndReport, Logger, LoggerDef, Report, StepReport
from surogate_core.errors import ConfigError, PluginError, RunStopped
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import Plugin, Provided
from surogate_core.plugins.registry import Registry


class Recorder:
    """Records its reports; raises `fails` at the second step."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.received: list[str] = []
        self._fails = fails

    def report(self, report: Report) -> None:
        if self._fails and self.received:
            raise self._fails
        self.received.append(f"{type(report).__name__} {report.step}")

    def close(self, status: str) -> None:
        self.received.append(status)


def opened(tmp_path: Path, *definitions: LoggerDef, notices: list[str] | None = None) -> Loggers:
    plugin = Plugin("p", "acme-board", "1.0", "acme")
    registry = Registry([plugin], [Provided("logger", d.name, d, plugin) for d in definitions], lambda system: [])
    loggers = Loggers()
    for logger in open_loggers(loaded(), registry, info(tmp_path), (notices if notices is not None else []).append):
        loggers.opened.append(logger)
    return loggers


def loaded() -> LoadedConfig:
    """A config that reports to `board`."""

    class WithBoard(Registry):
        def names(self, kind: str) -> list[str]:
            return [*super().names(kind), *(["board"] if kind == "logger" else [])]

    real = load_registry()
    registry = WithBoard(real.plugins, real.provided, real.diagnose)
    return load_config({"model": "m", "report_to": "board"}, registry=registry, source="run.yaml")


def define(logger: Logger, name: str = "board", always: bool = False) -> LoggerDef:
    return LoggerDef(name=name, summary="", open=lambda info, options: logger, always=always)


def test_core_loggers_and_requested_ones_are_opened(tmp_path: Path) -> None:
    own, asked, idle = Recorder(), Recorder(), Recorder()
    loggers = opened(tmp_path, define(own, "own", always=True), define(asked), define(idle, "idle"))
    loggers.report(step(1))
    loggers.report(evaluation(1))
    loggers.status = "done"
    loggers.close()
    assert own.received == asked.received == ["StepReport 1", "EvalReport 1", "done"] and idle.received == []


def test_a_tracker_that_fails_is_a_notice_and_the_run_continues_without_it(tmp_path: Path) -> None:
    own, broken, notices = Recorder(), Recorder(OSError("no route")), list[str]()
    loggers = opened(tmp_path, define(own, "own", always=True), define(broken), notices=notices)
    for number in (1, 2, 3):
        loggers.report(step(number))
    loggers.status = "done"
    loggers.close()
    assert broken.received == ["StepReport 1"]
    assert own.received == [*(f"StepReport {number}" for number in (1, 2, 3)), "done"]
    (notice,) = notices
    assert "board" in notice and "no route" in notice and "metrics.jsonl" in notice


def test_a_tracker_may_end_the_run(tmp_path: Path) -> None:
    loggers = opened(tmp_path, define(Recorder(RunStopped("disk full"))))
    loggers.report(step(1))
    with pytest.raises(RunStopped, match="disk full"):
        loggers.report(step(2))


@pytest.mark.parametrize(("raised", "expected"), [(ConfigError, ConfigError), (ImportError, PluginError)])
def test_a_tracker_that_cannot_start_is_an_error_that_names_it(tmp_path: Path, raised: Any, expected: Any) -> None:
    def fail(info: Any, options: Any) -> Logger:
        raise raised("board: needs a key")

    with pytest.raises(expected, match="board: needs a key"):
        opened(tmp_path, LoggerDef(name="board", summary="", open=fail))


@pytest.mark.parametrize("missing", ["library", "plugin"])
def test_tests_of_a_tracker_that_is_not_installed_are_skipped_with_the_reason(missing: str) -> None:
    trackers = ("tensorboard", "wandb", "mlflow")
    names = {"library": trackers, "plugin": tuple(f"surogate_log_{name}" for name in trackers)}[missing]
    root = Path(__file__).parents[1]
    paths = [str(root / f"plugins/surogate_log_{name}/tests") for name in trackers]
    code = (
        f"import sys, pytest\nsys.modules.update(dict.fromkeys({names!r}))\n"
        f"sys.exit(pytest.main(['-p', 'no:cacheprovider', *{paths!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "3 skipped" in done.stdout and "error" not in done.stdout.lower()
    for name in trackers:
        assert f"is not installed: pip install surogate-log-{name}" in done.stdout


def test_a_logger_without_report_cannot_be_made() -> None:
    class Old(Logger):
        def step(self, report: StepReport) -> None:
            """As loggers had it."""

    with pytest.raises(TypeError, match="abstract method"):
        Old()  # type: ignore[abstract]


def test_the_end_is_reported_to_all_loggers_though_one_fails_at_it(tmp_path: Path) -> None:
    """The file that cannot be written is often why a run ends."""
    own, full = Recorder(), Recorder(RunStopped("disk full"))
    loggers = opened(tmp_path, define(full, "full", always=True), define(own))
    loggers.report(step(1))

    def end(error: BaseException) -> EndReport:
        return EndReport(step=1, status="failed", message=str(error), time=1e9)

    with pytest.raises(ValueError, match="why"), loggers.closing(end):
        raise ValueError("why")
    assert own.received == ["StepReport 1", "EndReport 1", "failed"]
    assert full.received == ["StepReport 1", "failed"]


def test_loggers_that_a_run_selects_are_checked_and_no_others(tmp_path: Path) -> None:
    checked = list[Path]()

    def refuse(output_dir: Path, options: object) -> None:
        checked.append(output_dir)
        raise ConfigError("no address")

    plugin = Plugin("p", "acme-board", "1.0", "acme")
    definitions = [replace(define(Recorder(), name), check=refuse) for name in ("idle", "board")]
    provided = [Provided("logger", d.name, d, plugin) for d in definitions]
    with pytest.raises(ConfigError, match="no address"):
        check_loggers(loaded(), Registry([plugin], provided, lambda system: []))
    assert checked == [Path(loaded().config.output_dir)]
    check_loggers(loaded(), Registry([plugin], provided[:1], lambda system: []))
