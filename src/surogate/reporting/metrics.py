"""`metrics.jsonl`, the record of a run.

One JSON object per line. "log" is its kind:

    {"log": "run", "run_name", "time", "config", "versions", "device", "parameters", "trainable_parameters",
     "total_steps", "steps_per_epoch", "tokens_per_step", "planned"}        first, and again whenever a run resumes; and
                                                                            "headlines", metrics for a summary, if any
    {"log": "step", "step", "epoch", "loss", "norm", "lr", "tokens", "valid_tokens", "tokens_per_second",
     "duration_ms", "time"}                                                 and "skipped": true if it was not applied;
                                                                            "mfu" on a GPU whose peak is known
    {"log": "eval", "step", "loss", "valid_tokens", "duration_ms", "time"}  and "in_nats": false of other losses;
                                                                            of both "groups" and "metrics" if any, of
                                                                            steps "groups_per_second"; "best_step" if
                                                                            the run looks for the best
    {"log": "outputs", "step", "weights_step", "metric", "best_step", "best_value", "stop_reason", "time"}
                                                                            at the end of such a run, and of one that a
                                                                            callback has stopped
    {"log": "end", "step", "status", "message", "time"}                     if an error or a signal ended the run
    {"log": "gpu", "step", "gpu", "utilization", "memory_utilization", "memory_used_bytes", "memory_total_bytes",
     "power_watts", "power_limit_watts", "temperature_celsius", "sm_clock_mhz", "memory_clock_mhz", "time"}
    {"log": "sample", "step", "index", "prompt", "text", "tokens", "finish", "duration_ms", "time"}
    {"log": "callback", "step", "metrics", "time"}                          what a callback of a script has logged
    {"log": "numerics", "step", "columns": [name], "tensors": {name: [a figure for each column]}, "time"}

Times are in seconds since 1970. Numbers that are not finite are null, because JSON cannot express them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from surogate_core.api import (
    CallbackReport,
    EndReport,
    EvalReport,
    GpuReport,
    Logger,
    NumericsReport,
    OutputReport,
    Report,
    RunInfo,
    SampleReport,
    StepReport,
)
from surogate_core.api.regular_file import open_own
from surogate_core.errors import ConfigError, RunStopped

from ..machine.replaced_file import replaced

__all__ = ["METRICS_FILE", "JsonLinesLogger", "read_metrics"]

METRICS_FILE = "metrics.jsonl"

_NAMES = {
    StepReport: "step",
    EvalReport: "eval",
    OutputReport: "outputs",
    EndReport: "end",
    GpuReport: "gpu",
    NumericsReport: "numerics",
    SampleReport: "sample",
    CallbackReport: "callback",
}

_OF_RUN = (
    *("config", "versions", "device", "parameters", "trainable_parameters"),
    *("total_steps", "steps_per_epoch", "tokens_per_step", "planned"),
)


def metrics_path(output_dir: Path, log_file: str | None) -> Path:
    """Return the metrics file of a run: `log_file` of its config, else `output_dir/metrics.jsonl`."""
    return Path(log_file) if log_file else output_dir / METRICS_FILE


class JsonLinesLogger(Logger):
    """Appends each report to the metrics file (`metrics_path`) immediately.

    A line is one unbuffered write to a file opened for appending. So readers see whole lines, and a killed process
    loses no report. Raises ConfigError if the file cannot be opened, and RunStopped if a line cannot be written (disk
    full, file or folder removed): a run that cannot be recorded stops, and the loop saves it first.
    """

    def __init__(self, info: RunInfo) -> None:
        self._path = metrics_path(info.output_dir, info.config.get("log_file"))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _mend_last_line(self._path)
            named = bool(info.config.get("log_file"))  # its user may name a link, or /dev/null
            self._file = FileIO(self._path if named else open_own(self._path, os.O_WRONLY | os.O_APPEND), "a")
        except OSError as error:
            key = "log_file" if info.config.get("log_file") else "output_dir"
            raise ConfigError(
                f"{key}: cannot write {self._path}: {error.strerror or error}. Free it or name another directory."
            ) from error
        run = {"log": "run", "run_name": info.run_name, "time": time.time()}
        shown = {"headlines": list(info.headlines)} if info.headlines else {}
        self._write(run | {name: getattr(info, name) for name in _OF_RUN} | shown)

    def report(self, report: Report) -> None:
        if isinstance(report, NumericsReport):
            rows = {t.name: row for t, row in zip(report.tensors, report.values, strict=True)}
            columns = [column.name for column in report.columns]
            figures = {"step": report.step, "columns": columns, "tensors": rows, "time": report.time}
        else:
            figures = asdict(report)
            if isinstance(report, StepReport | EvalReport):
                usual = {"skipped": False, "in_nats": True, "groups": 0, "metrics": {}}
                usual |= {"groups_per_second": 0.0, "mfu": None, "best_step": None}
                figures = {name: value for name, value in figures.items() if value != usual.get(name, report)}
        self._write({"log": _NAMES[type(report)], **figures})

    def close(self, status: str) -> None:
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(finite(record), allow_nan=False).encode() + b"\n")
        self._refuse_lost()
        try:
            while line:
                line = line[self._file.write(line) :]  # a nearly full disk may write only part of a line
        except OSError as error:
            raise RunStopped(
                f"{self._path}: cannot write: {error.strerror or error}. Make room on the disk, then resume the run."
            ) from error

    def _refuse_lost(self) -> None:
        """Raise RunStopped if the path is no longer that of the open file: its folder may be another run's by now."""
        held = os.fstat(self._file.fileno())
        try:
            found = os.stat(self._path)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            what = "removed" if found is None else "replaced"
            raise RunStopped(
                f"{self._path}: was {what}, or its folder was, while the run trained: what follows would be recorded "
                "nowhere. Resume the run from what is saved."
            )


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a `metrics.jsonl` in order. Skip lines that a crash left incomplete."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from (record for record in map(parsed_record, lines) if record is not None)


def cut_metrics(path: Path, step: int, *, evaluated: bool = True, sampled: bool = True) -> None:
    """Remove from a metrics file the records after `step`, from which a run resumes, and repeated steps and samples.

    A step is repeated if an earlier run started again in the same folder; its later record stays. `evaluated`: the
    checkpoint holds the evaluation of `step`; if not, its record goes too, as the resumed run repeats it. `sampled`:
    the same of its samples. The record of outputs after `step` goes in any case. Those of starts and of ends stay: they
    are the history of the run. The file is replaced atomically. Raises ConfigError if it cannot be rewritten.
    """
    if not path.is_file():
        return
    kept: list[tuple[int | None, bytes]] = []
    samples: dict[tuple[Any, Any], tuple[int | None, bytes]] = {}
    written = (("eval", evaluated), ("sample", sampled), ("outputs", False))
    highest, repeated = 0, {kind for kind, done in written if not done}
    try:
        for line in path.read_bytes().splitlines():
            record = parsed_record(line)
            at = record.get("step") if record and record.get("log") != "end" else None
            if record is None or (at is not None and at > step):
                continue
            if at == step and record.get("log") in repeated:
                continue
            if record.get("log") == "step" and at is not None:
                if at <= highest:
                    kept = [(other, text) for other, text in kept if other is None or other < at]
                highest = at
            if record.get("log") == "sample":
                of = at, record.get("index")
                kept = [pair for pair in kept if pair is not samples.get(of)]
                samples[of] = at, line
                kept.append(samples[of])
                continue
            kept.append((at, line))
        with replaced(path) as fresh, fresh.open("wb") as file:
            file.writelines(text + b"\n" for _, text in kept)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"output_dir: cannot rewrite {path}: {error.strerror or error}.") from error


def parsed_record(line: bytes | str) -> dict[str, Any] | None:
    """Return the record of a line, or None if it has no valid record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step", 0), int)
    return record if whole else None


def finite(value: Any) -> Any:
    """Return `value` with every float that is not finite replaced by None, and dataclasses as mappings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: finite(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _mend_last_line(path: Path) -> None:
    """Make an existing file end in a newline. A crash during a write leaves an incomplete line (or NULs) at its end.

    An incomplete line is removed: many readers of JSON lines reject a file with one bad line, and the resumed run
    writes the report again.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start > 0 and b"\n" not in tail:
            size = min(start, 1 << 16)
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
        partial = tail[tail.rfind(b"\n") + 1 :]
        if not partial:
            return
        try:
            json.loads(partial)
        except (ValueError, RecursionError):
            file.truncate(end - len(partial))
        else:
            file.seek(end)
            file.write(b"\n")
