"""Launchers, and what a run reports to its loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel

from ..origin import Definition
from .base import NoOptions


class Comm(Protocol):
    """What a worker knows of the others, and its way to reach them. A rank is one device, driven by one thread."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> int:
        """Index of the rank's device among those visible to its process."""
        ...

    def all_reduce(self, ranges: Sequence[tuple[int, int, str]], stream: int) -> None:
        """Enqueue the sum over all ranks, in place, of each (device address, elements, dtype)."""
        ...

    def check(self) -> None:
        """Raise what went wrong on the way to the others since the start. From any thread, without waiting."""
        ...

    def abort(self) -> None:
        """Give up: what is enqueued ends instead of waiting for the others. From any thread, without waiting."""
        ...


@dataclass(frozen=True)
class Topology:
    """What a launcher is asked for: devices of this machine."""

    devices: int = 1


@dataclass(frozen=True, kw_only=True)
class LauncherDef(Definition):
    """Brings up the processes of a run and the ways between their devices.

    run     (work, topology, options) -> what `work` returns in the process of rank 0. In every process it calls `work`
            once, with a Comm for each device that the process drives, in order of rank, and takes the Comms down
            after it. A process that fails must end the others.
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    run: Callable[[Callable[[Sequence[Comm]], Any], Topology, Any], Any]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a logger is told when a run begins. `config` is the resolved config, ready for JSON.

    done_steps: optimizer steps of the checkpoint that the run goes on from, 0 at a fresh start. Reports of later steps
    that an earlier run may have left in `output_dir` do not count any more.
    """

    run_name: str
    output_dir: Path
    total_steps: int
    steps_per_epoch: int
    tokens_per_step: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    parameters: int
    trainable_parameters: int
    done_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """An optimizer step. loss: mean over valid tokens, nats. norm: of the gradient before clipping.

    tokens: non-padding positions. valid_tokens: positions with a label. tokens_per_second = tokens / duration.
    skipped: the step was not applied, since loss or norm was not finite.
    """

    step: int
    epoch: float
    loss: float
    norm: float
    lr: float
    tokens: int
    valid_tokens: int
    tokens_per_second: float
    duration_ms: float
    time: float
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """An evaluation after `step` optimizer steps. loss: mean over valid tokens, nats."""

    step: int
    loss: float
    valid_tokens: int
    duration_ms: float
    time: float


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """A look at one GPU of the run after `step` optimizer steps. What the driver does not tell of it is None.

    gpu: its number in the run. utilization: part of the driver's last sampling period (up to a second) in which a
    kernel ran, 0 to 1; memory_utilization: in which its memory was read or written. memory_used_bytes: by all
    processes.
    """

    step: int
    gpu: int
    utilization: float | None
    memory_utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    time: float

    def figures(self) -> dict[str, float]:
        """What changes and was told, by name, memory in GiB: the curves of a tracker."""
        used = self.memory_used_bytes
        figures = {
            "utilization": self.utilization,
            "memory_utilization": self.memory_utilization,
            "memory_used_gib": None if used is None else used / 2**30,
            "power_watts": self.power_watts,
            "temperature_celsius": self.temperature_celsius,
            "sm_clock_mhz": self.sm_clock_mhz,
            "memory_clock_mhz": self.memory_clock_mhz,
        }
        return {name: value for name, value in figures.items() if value is not None}


@runtime_checkable
class Logger(Protocol):
    """Receives reports, in order, from the loop's thread. A GPU's report comes when it is there: its step may be past.

    One that the user asked for and that raises is told of and left out from then on; RunStopped ends the run, saved.
    """

    def step(self, report: StepReport) -> None: ...
    def eval(self, report: EvalReport) -> None: ...
    def gpu(self, report: GpuReport) -> None: ...
    def close(self, status: str) -> None:
        """status: "done", "interrupted" or "failed"."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoggerDef(Definition):
    """A place where reports go. Opened only when `report_to` names it (`always`: in every run).

    open    (info, options) -> Logger, before the first step. Raises ConfigError for what the user has to change.
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    open: Callable[[RunInfo, Any], Logger]
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class SystemInfo:
    """What `surogate doctor` knows of the machine."""

    python: str
    platform: str
    cpu_count: int
    memory_bytes: int
    gpus: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One line of `surogate doctor`. level: "ok", "warning" or "error"; remedy: what to do, empty when ok."""

    level: str
    subject: str
    message: str
    remedy: str = ""
