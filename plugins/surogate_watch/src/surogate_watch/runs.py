"""Runs, by the files in their output folders: run.yaml, the metrics file, the lock. Nothing is written or locked."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

import yaml

RUN_FILE = "run.yaml"
METRICS = "metrics.jsonl"
LOCK = ".surogate.lock"

DEEPEST = 3
"""Levels of folders below a given one in which runs are found."""

STALLED_STEPS = 20
STALLED_SECONDS = 120.0
"""A run stalls if its last line is older than both: that number of its steps, and of seconds."""

RECENT = 20
"""Steps over which speed is averaged."""


@dataclass
class Run:
    """A run, as far as its files tell. Bytes are of one device.

    state      starting, running, stalled, finished, stopped (it ended before its last step), or killed (its process
               is gone and has not removed its lock)
    holder     the process that holds the folder, or ""
    age        seconds since the last line of the metrics
    losses     (step, loss) of all steps
    planned    `tokens_per_second` and `device_bytes` of the plan; empty for runs of older versions
    """

    folder: Path
    name: str = ""
    state: str = "starting"
    holder: str = ""
    device: str = ""
    age: float | None = None
    step: int = 0
    total_steps: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: int | None = None
    planned: dict[str, float] = field(default_factory=dict)
    seconds_left: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the run as data: an element of `surogate watch --json`."""
        last = self.losses[-1][1] if self.losses else None
        shown = {key: value for key, value in vars(self).items() if key not in ("losses", "folder")}
        return {"folder": str(self.folder), **shown, "loss": last}


class RunFiles:
    """The files of one run. `read` continues where it has stopped."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder, name=folder.name)
        self._metrics = _metrics_file(folder)
        self._identity: tuple[int, int] = (0, 0)
        self._offset = 0
        self._tail = b""
        self._time: float | None = None
        self._durations: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def read(self, now: float | None = None) -> Run:
        """Read what is new, and return the run as it is at `now`."""
        now = time.time() if now is None else now
        self._read_metrics()
        run = self.run
        run.holder, alive = _holder(run.folder)
        run.age = None if self._time is None else max(0.0, now - self._time)
        run.state = self._state(alive)
        seconds = sum(duration for duration, _ in self._durations)
        run.tokens_per_second = sum(tokens for _, tokens in self._durations) / seconds if seconds else None
        left = run.total_steps - run.step
        moving = run.state in ("running", "stalled") and self._durations
        run.seconds_left = left * seconds / len(self._durations) if moving else None
        return run

    def _read_metrics(self) -> None:
        try:
            stat = self._metrics.stat()
        except (OSError, ValueError):
            return
        if not S_ISREG(stat.st_mode):  # a pipe would wait for its writer
            return
        if (stat.st_dev, stat.st_ino) != self._identity or stat.st_size < self._offset:  # a resumed run replaces it
            self._identity, self._offset, self._tail = (stat.st_dev, stat.st_ino), 0, b""
            self._durations.clear()
            self.run.losses.clear()
            self.run.step = 0
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError):
                continue  # no record of a run

    def _take(self, record: dict[str, Any]) -> None:
        run = self.run
        self._time = record.get("time", self._time)
        if record.get("log") == "run":
            run.name, run.device = record["run_name"], record["device"]
            run.total_steps, run.planned = record["total_steps"], record.get("planned", {})
        elif record.get("log") == "step":
            run.step = record["step"]
            self._durations.append((record["duration_ms"] / 1000, record["tokens"]))
            if record["loss"] is not None:
                run.losses.append((run.step, record["loss"]))
        elif record.get("log") == "eval":
            run.eval_loss = record["loss"]
        elif record.get("log") == "gpu" and record["memory_used_bytes"] is not None:
            run.memory_bytes = max(record["memory_used_bytes"], (run.memory_bytes or 0) if record["gpu"] else 0)

    def _state(self, alive: bool | None) -> str:
        run = self.run
        if not run.holder:
            if not self._time:
                return "stopped"
            return (
                "finished"
                if run.total_steps and run.step >= run.total_steps and _has_outputs(run.folder)
                else "stopped"
            )
        if alive is False:
            return "killed"
        if not run.step:
            return "starting"
        longest = max((duration for duration, _ in self._durations), default=0.0)
        return "stalled" if (run.age or 0) > max(STALLED_SECONDS, STALLED_STEPS * longest) else "running"


def _metrics_file(folder: Path) -> Path:
    return Path(_key(folder, "log_file") or folder / METRICS)


def _key(folder: Path, key: str) -> str:
    """Return the text of a key in the run file of a folder; "" without one, or in a file of something else."""
    try:
        if not (folder / RUN_FILE).is_file():
            return ""
        found = yaml.safe_load((folder / RUN_FILE).read_text(encoding="utf-8"))[key]
        return found if isinstance(found, str) else ""
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
        return ""


def _has_outputs(folder: Path) -> bool:
    """Return whether the trained model or adapter is there: it is written after the last step."""
    return any(any(place.glob("*.safetensors")) for place in (folder, folder / "adapter"))


def _holder(folder: Path) -> tuple[str, bool | None]:
    """Return who holds the lock of a folder, and whether that process lives; None: it is on another machine."""
    try:
        if not S_ISREG((folder / LOCK).lstat().st_mode):
            return "a process", None
        found = json.loads((folder / LOCK).read_text())
        pid, host = int(found["pid"]), str(found["host"])
    except FileNotFoundError:
        return "", None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # it is being written
        return "a process", None
    if host != socket.gethostname():
        return f"process {pid} on {host}", None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return f"process {pid}", False
    except PermissionError:
        pass
    return f"process {pid}", True


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the output folders of runs in and below `folders`, in order of their names."""
    return sorted({path for folder in folders for path in _runs_in(folder, DEEPEST)})


def _runs_in(folder: Path, deep: int) -> Iterator[Path]:
    named = _key(folder, "output_dir")  # a run.yaml that names another folder is what a user starts
    if (folder / METRICS).is_file() or (named and Path(named).resolve() == folder.resolve()):
        yield folder
        return
    if deep == 0:
        return
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return
    for path in inside:
        yield from _runs_in(path, deep - 1)
