"""The package `surogate` in Python: the commands as functions, with the keys of a config as keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from surogate_core.api import EvalReport, Report, StepReport

from . import run
from .run import LoadedConfig, Plan, TrainResult

Config = str | Path | Mapping[str, Any]
"""A YAML file, or a mapping of its keys."""

Mode = Literal["train", "pt", "sft"]
Callback = Callable[[StepReport | EvalReport], bool | None]


@dataclass(frozen=True, kw_only=True)
class Result(TrainResult):
    """The result of a run: `output_dir`, `steps`, the last `loss`, `evaluations`, and what `TrainResult` has.

    metrics_file  what the run has recorded, a JSON object a line
    """

    metrics_file: Path

    @property
    def stopped(self) -> bool:
        """Whether a callback, a signal or early stopping ended the run. It is saved; after a signal without outputs."""
        return self.signal_exit != 0 or self.steps < self.total_steps

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics_file`, of all parts of a run that was resumed."""
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each step; None where it was not finite."""
        return [record["loss"] for record in self.metrics if record["log"] == "step"]


def load(config: Config, *, mode: Mode = "train", **keys: Any) -> LoadedConfig:
    """Read and validate a config. `keys` replace those of the file. Raises ConfigError naming file and key."""
    return run.load(config, [f"{key}={json.dumps(value, default=str)}" for key, value in keys.items()], mode)


def plan(config: Config, *, mode: Mode = "train", device: str | None = None, nodes: int = 1, **keys: Any) -> Plan:
    """Plan a run: `.report.fits`, `.report.device_bytes["total"]`, `.report.tokens_per_second`.

    `device`: a name such as "h200"; None: what a run on this machine would train on.
    """
    return run.plan(load(config, mode=mode, **keys), device, nodes=nodes)


def train(
    config: Config,
    *,
    mode: Mode = "train",
    callback: Callback | None = None,
    notice: Callable[[str], None] = print,
    **keys: Any,
) -> Result:
    """Train, and return losses and folders. `keys` replace those of the file.

    `callback` is called after each step with a `StepReport`, and after each evaluation with an `EvalReport`. If it
    returns True, the run finishes early: after the step that is running it is saved, so that it can be resumed,
    evaluated, and its outputs are written. What it raises ends the run at once. `notice` is called with each line that
    a run prints. Raises ConfigError for what cannot be used, and RunStopped if the run stops itself.
    """
    loaded = load(config, mode=mode, **keys)
    found = run.train(loaded, notice, listen=None if callback is None else _listener(callback))
    values = {field.name: getattr(found, field.name) for field in fields(TrainResult)}
    return Result(**values, metrics_file=Path(loaded.config.log_file or found.output_dir / "metrics.jsonl"))


def sft(
    config: Config, *, callback: Callback | None = None, notice: Callable[[str], None] = print, **keys: Any
) -> Result:
    """As `train`, with the defaults for fine-tuning: LoRA."""
    return train(config, mode="sft", callback=callback, notice=notice, **keys)


def pt(
    config: Config, *, callback: Callback | None = None, notice: Callable[[str], None] = print, **keys: Any
) -> Result:
    """As `train`, with the defaults for pre-training: all weights."""
    return train(config, mode="pt", callback=callback, notice=notice, **keys)


def _listener(callback: Callback) -> Callable[[Report], bool | None]:
    return lambda report: callback(report) if isinstance(report, StepReport | EvalReport) else None
