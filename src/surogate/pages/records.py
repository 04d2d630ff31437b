"""A run as its output folder tells it: its metrics, its plan and its config. Nothing is written or locked."""

from __future__ import annotations

import json
import math
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from surogate_core.api.destination import RUN_FILE
from surogate_core.errors import ConfigError

from ..checkpoints.folder_lock import LOCK
from ..config.load import without_address
from ..reporting.metrics import METRICS_FILE, metrics_path, read_metrics
from ..reporting.text import names_text
from ..runs.plan_json import PLAN_FILE

Json = dict[str, Any]
Numbers = npt.NDArray[np.float64]
_LARGEST = 1e100

MOST_NUMERICS = 12
"""Reports on numerics that are kept, the last ones."""

State = Literal["finished", "running", "stopped", "killed", "not started"]


@dataclass
class RunRecords:
    """The records of a run, each step once. A folder may lack any of its files but not all.

    head      the record of its last start: `config`, `device`, `total_steps` and so on; empty without metrics
    outputs   the record of its outputs, of a finished run that looks for its best evaluation; else empty
    end       the record of the error or the signal that ended it; else empty
    resumed   steps after which the run started again
    earlier   records of what had ended it before, in order
    plan      the document of plan.json; None without one
    problems  sentences about files that cannot be read
    """

    folder: Path
    state: State = "not started"
    head: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    steps: list[Json] = field(default_factory=list)
    evals: list[Json] = field(default_factory=list)
    numerics: list[Json] = field(default_factory=list)
    samples: list[Json] = field(default_factory=list)
    gpus: list[Json] = field(default_factory=list)
    outputs: Json = field(default_factory=dict)
    end: Json = field(default_factory=dict)
    earlier: list[Json] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    plan: Json | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.head.get("run_name") or self.config.get("run_name") or self.folder.resolve().name)

    @property
    def done(self) -> int:
        """The last step."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def total(self) -> int:
        """Steps of the whole run; 0 if that is not known."""
        found = number(self.head.get("total_steps"))
        return int(found) if found > 0 else 0

    @property
    def planned(self) -> Mapping[str, float]:
        """`tokens_per_second` and `device_bytes` of the plan, as far as they are known."""
        found = self.head.get("planned")
        if isinstance(found, Mapping):
            return found
        if self.plan is None:
            return {}
        return {
            "tokens_per_second": self.plan["step"]["tokens_per_second"],
            "device_bytes": self.plan["device_bytes"]["total"],
        }

    @property
    def stop_reason(self) -> str:
        """The reason why the run ended before its last step by itself; "" if it did not."""
        return str(self.outputs.get("stop_reason") or "")

    @property
    def best_eval(self) -> int | None:
        """The index in `evals` of the best one: by the rule of the run, or by the loss if it has none. None: no loss is
        a number."""
        losses = of(self.evals, "loss")
        known = [int(index) for index in np.flatnonzero(np.isfinite(losses))]
        rule = self.evals[-1].get("best_step") if self.evals else None
        return min(known, key=lambda index: (self.evals[index]["step"] != rule, losses[index]), default=None)

    @property
    def in_nats(self) -> bool:
        """Whether losses are known to be nats per token."""
        return bool(self.evals) and all(record.get("in_nats", True) for record in self.evals)

    @property
    def rate(self) -> float:
        """Tokens per second in the median, without the first step; NaN without steps."""
        rates = of(self.steps[1:] or self.steps, "tokens_per_second")
        rates = rates[np.isfinite(rates)]
        return float(np.median(rates)) if len(rates) else math.nan

    @property
    def metrics(self) -> list[str]:
        """Names of what the loss and the model report besides the loss."""
        records = (*self.steps[:1], *self.steps[-1:], *self.evals[-1:])
        return list(dict.fromkeys(name for record in records for name in metrics_of(record)))


def read_run(folder: Path) -> RunRecords:
    """Return the records of a run. Raises ConfigError for a folder that holds neither metrics, a plan nor a config."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder}: {what}. Name the output_dir of a run.")
    run = RunRecords(folder)
    run.config = _read_config(run)
    metrics = metrics_path(folder, None)
    if not metrics.is_file() and isinstance(run.config.get("log_file"), str):
        metrics = Path(run.config["log_file"])
    _read_plan(run)
    if metrics.is_file():
        try:
            _read_metrics(run, metrics)
        except OSError as error:
            run.problems.append(f"{metrics.name} cannot be read: {error.strerror}.")
    elif not run.config and run.plan is None:
        raise ConfigError(f"{folder}: holds no run: no metrics.jsonl, {RUN_FILE} or {PLAN_FILE}. {_remedy(folder)}")
    run.state = _state(run)
    return run


def _remedy(folder: Path) -> str:
    """Return which folder to name instead: one of the runs that are in it, if there are some."""
    files = (METRICS_FILE, RUN_FILE, PLAN_FILE)
    runs = sorted({found.parent.name for file in files for found in folder.glob(f"*/{file}")})
    return f"Name one of the runs in it: {names_text(runs)}." if runs else "Name the output_dir of a run."


def of(records: Iterable[Json], key: str) -> Numbers:
    """Return a number of each record, or one of its metrics; NaN where it is missing or was not finite."""
    return np.array([number(record[key] if key in record else metrics_of(record).get(key)) for record in records])


def number(value: Any) -> float:
    """Return a number of a file; NaN for anything else, and for one as large as only a run that diverged has."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return float(value) if known else math.nan


def metrics_of(record: Json) -> Mapping[str, Any]:
    found = record.get("metrics")
    return found if isinstance(found, Mapping) else {}


def _read_config(run: RunRecords) -> Json:
    import yaml

    path = run.folder / RUN_FILE
    try:
        found = yaml.safe_load(_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        run.problems.append(f"{RUN_FILE} cannot be read: {_first_line(error)}.")
        return {}
    if isinstance(found, dict):
        return without_address(found)
    run.problems.append(f"{RUN_FILE} holds no keys.")
    return {}


def _read_plan(run: RunRecords) -> None:
    path = run.folder / PLAN_FILE
    try:
        found = json.loads(_text(path))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError) as error:
        run.problems.append(f"{PLAN_FILE} cannot be read: {_first_line(error)}.")
        return
    if not isinstance(found, dict):
        run.problems.append(f"{PLAN_FILE} is not the plan of a run: memory is not shown.")
        return
    run.plan = found


def _read_metrics(run: RunRecords, path: Path) -> None:
    kept: dict[str, list[Json]] = defaultdict(list)
    for record in read_metrics(path):
        kind, step = record.get("log", record.get("kind")), record.get("step")
        if kind == "run":
            run.head = record
            run.earlier += [run.end] if run.end else []
            run.end = {}
            if kept["step"]:
                run.resumed.append(int(kept["step"][-1]["step"]))
        elif kind == "end" and isinstance(record.get("message"), str):
            run.end = record
        elif isinstance(kind, str) and isinstance(step, int):
            if kind == "step":  # a run that repeats steps replaces what was recorded of them
                for other in kept.values():
                    _drop(other, step)
            elif kind == "eval":
                _drop(kept["eval"], step)
            kept[kind].append(record)
    run.steps, run.evals, run.gpus = kept["step"], kept["eval"], kept["gpu"]
    run.numerics = [table for record in kept["numerics"] if (table := _table(record))][-MOST_NUMERICS:]
    run.samples = [record for record in kept["sample"] if isinstance(record.get("text"), str)]
    run.outputs = next((record for record in kept["outputs"] if record["step"] == run.done), {})
    run.resumed = [step for step in run.resumed if step < run.done]
    if isinstance(run.head.get("config"), dict):
        run.config = without_address(run.head["config"])


def _drop(records: list[Json], step: int) -> None:
    while records and records[-1]["step"] >= step:
        records.pop()


def _table(record: Json) -> Json | None:
    """Return a report on numerics with a number or None for each column of each tensor; None if it is no table."""
    columns, tensors = record.get("columns"), record.get("tensors")
    if not (isinstance(columns, list) and isinstance(tensors, dict) and columns):
        return None
    rows = {
        name: values for name, values in tensors.items() if isinstance(values, list) and len(values) == len(columns)
    }
    known = {name: [v if math.isfinite(number(v)) else None for v in values] for name, values in rows.items()}
    return {"step": record["step"], "columns": [str(name) for name in columns], "tensors": known} if known else None


def _state(run: RunRecords) -> State:
    alive = _held(run.folder)
    if alive is not None:
        return "running" if alive else "killed"
    if not run.steps:
        return "not started"
    has_outputs = any(any(place.glob("*.safetensors")) for place in (run.folder, run.folder / "adapter"))
    copied = not any(run.folder.glob("step_*"))  # only records were copied to where the report is made
    ended = bool(run.stop_reason) or 0 < run.total <= run.done
    return "finished" if ended and (has_outputs or copied) else "stopped"


def _held(folder: Path) -> bool | None:
    """Return whether the process lives that holds the folder, as far as can be told; None if none holds it."""
    try:
        found = json.loads(_text(folder / LOCK))
        process, host = int(found["pid"]), str(found["host"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it is being written
        return True
    if host != socket.gethostname():
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _text(path: Path) -> str:
    """Return the text of a file. Raises FileNotFoundError for what is none, such as a pipe, which would block."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.read_text(encoding="utf-8")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def names_of(runs: Sequence[RunRecords]) -> list[str]:
    """Return a name for each run, with its folder where names are equal."""
    names = [run.name for run in runs]
    return [f"{run.name} ({run.folder})" if names.count(run.name) > 1 else run.name for run in runs]
