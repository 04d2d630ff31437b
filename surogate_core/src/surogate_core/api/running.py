"""Loggers and the reports that they receive, and `surogate doctor`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, runtime_checkable

from ..origin import Definition, Name
from .base import NoOptions, Options
from .recipes import NumericsColumn, QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Properties of a run, for loggers.

    config      the resolved config, as JSON types
    done_steps  optimizer steps of the checkpoint that the run resumes from; 0 for a new run. Reports of later steps
                that an earlier run left in `output_dir` are obsolete.
    eval_time   planned time of an evaluation, in optimizer steps; 0: the run has no validation set
    planned     of the plan: `tokens_per_second`, and `device_bytes` of each device
    evaluated   the steps after which the run evaluates, in order; none without a validation set
    headlines   names of the metrics that a summary shows beside the loss (`Metric.headline`)
    group       what `StepReport.groups` counts: "pairs", "documents" or "groups"; "" if the loss has none
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
    eval_time: float = 0.0
    planned: Mapping[str, float] = field(default_factory=dict)
    evaluated: Sequence[int] = ()
    headlines: Sequence[str] = ()
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """An optimizer step.

    loss               mean of the loss's first term, over the valid tokens (in nats) or the groups
    norm               2-norm of the gradient before clipping
    tokens             positions that are not padding
    valid_tokens       positions with a label
    groups             of documents, if the loss has any: pairs, for example
    metrics            what the loss and the model report besides, by name
    tokens_per_second  tokens / duration
    groups_per_second  groups / duration
    mfu                model FLOPs utilization: FLOPs of the tokens by the plan, without recomputation, / duration / the
                       dense bf16 peaks of all devices; None if a peak is not known, as that of a CPU
    time               when the report was made, in seconds since the epoch
    skipped            the step was not applied, because its gradient norm was not finite
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
    groups: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    groups_per_second: float = 0.0
    mfu: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """An evaluation after `step` optimizer steps. `loss`, `groups`, `metrics`: as in `StepReport`.

    in_nats    `loss` is a cross-entropy per token, so that exp(loss) is a perplexity
    best_step  step of the best evaluation so far, which may be this one; None: there is none, or the run looks for none
    """

    step: int
    loss: float
    valid_tokens: int
    duration_ms: float
    time: float
    in_nats: bool = True
    groups: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    best_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutputReport:
    """The end of a run that looks for its best evaluation or was stopped, once its outputs are written.

    step          the last one of the run
    weights_step  the step whose weights the outputs have
    metric        by which evaluations are compared, with its best value, after `best_step`; None if none was finite, or
                  the run did not look for it
    stop_reason   why the run ended before its last step; "" if it did not
    """

    step: int
    weights_step: int
    metric: str
    best_step: int | None
    best_value: float | None
    stop_reason: str
    time: float


@dataclass(frozen=True, kw_only=True)
class EndReport:
    """The end of a run by an error or by a signal, the last report of it.

    step     the last one that is reported
    status   "failed" or "interrupted", as `Logger.close` gets it
    message  the error on one line, or the name of the signal
    """

    step: int
    status: str
    message: str
    time: float


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """The state of one GPU of the run after `step` optimizer steps. Metrics that the driver does not have are None.

    gpu                 index of the GPU in the run
    utilization         fraction of the driver's last sampling period (up to a second) in which a kernel ran
    memory_utilization  fraction of that period in which memory was read or written
    memory_used_bytes   of all processes
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

    def metrics(self) -> dict[str, float]:
        """Return the metrics that vary over time and are not None, by name, with memory in GiB."""
        used = self.memory_used_bytes
        metrics = {
            "utilization": self.utilization,
            "memory_utilization": self.memory_utilization,
            "memory_used_gib": None if used is None else used / 2**30,
            "power_watts": self.power_watts,
            "temperature_celsius": self.temperature_celsius,
            "sm_clock_mhz": self.sm_clock_mhz,
            "memory_clock_mhz": self.memory_clock_mhz,
        }
        return {name: value for name, value in metrics.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class NumericsReport:
    """Statistics of a recipe's number formats on the tensors that it quantizes, in a micro-batch of step `step`.

    values  a row of figures for each tensor, one for each column
    """

    step: int
    tensors: Sequence[QuantizedTensor]
    columns: Sequence[NumericsColumn]
    values: Sequence[Sequence[float]]
    time: float

    def largest(self) -> dict[str, tuple[tuple[float, int], ...]]:
        """Return the largest figure of each column over all blocks, and its block, for each tensor of a block.

        The keys are names of tensors with * in place of the block's index.
        """
        groups: dict[str, list[tuple[int, Sequence[float]]]] = {}
        for tensor, row in zip(self.tensors, self.values, strict=True):
            name = tensor.name.replace(f".{tensor.block}.", ".*.", 1)
            groups.setdefault(name, []).append((tensor.block, row))
        return {
            name: tuple(
                max(((row[i], block) for block, row in rows), key=lambda pair: pair[0])
                for i in range(len(self.columns))
            )
            for name, rows in groups.items()
        }


@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """A text that the model has written after `step` optimizer steps; 0: before the first.

    index   of the prompt among those of the run
    prompt  the text of the prompt, of a conversation its last message
    text    without special tokens
    tokens  of the text, with the one that ended it
    finish  "stop": the model has ended it; "length": it has as many tokens as it may have
    """

    step: int
    index: int
    prompt: str
    text: str
    tokens: int
    finish: str
    duration_ms: float
    time: float


@dataclass(frozen=True, kw_only=True)
class CallbackReport:
    """Figures that a callback of a script has logged after `step` optimizer steps, by name."""

    step: int
    metrics: Mapping[str, float]
    time: float


Report = StepReport | EvalReport | OutputReport | EndReport | GpuReport | NumericsReport | SampleReport | CallbackReport


def figures_of(report: Report) -> dict[str, float]:
    """Return the figures of a report by names that trackers group by their first part: `train/loss`, `gpu/0/power_w`.

    Texts, such as those of samples, are not among them.
    """
    match report:
        case StepReport():
            names = ("loss", "norm", "lr", "tokens_per_second", "epoch")
            figures = {name: getattr(report, name) for name in names} | dict(report.metrics)
            further = {"groups_per_second": report.groups_per_second or None, "mfu": report.mfu}
            figures |= {name: value for name, value in further.items() if value is not None}
            return {f"train/{name}": value for name, value in figures.items()}
        case EvalReport():
            return {f"eval/{name}": value for name, value in {"loss": report.loss, **report.metrics}.items()}
        case OutputReport():
            found = {"weights_step": report.weights_step, "best_step": report.best_step}
            figures = found | {f"best_{report.metric}": report.best_value}
            return {f"outputs/{name}": value for name, value in figures.items() if value is not None}
        case GpuReport():
            return {f"gpu/{report.gpu}/{name}": value for name, value in report.metrics().items()}
        case NumericsReport():
            return {
                f"numerics/{tensor.replace('*.', '')}/{column.name}": value
                for tensor, figures in report.largest().items()
                for column, (value, _) in zip(report.columns, figures, strict=True)
            }
        case CallbackReport():
            return {f"callback/{name}": value for name, value in report.metrics.items()}
        case _:
            return {}


@runtime_checkable
class Logger(Protocol):
    """Receives reports, in order, on the thread of the training loop. Reports of GPUs may arrive some steps late.

    If the logger of a plugin raises, the user gets a notice and it receives no more reports. RunStopped ends the run,
    which is saved first.
    """

    @abstractmethod
    def report(self, report: Report) -> None:
        """Receive a report. Kinds that a logger does not know are not for it: later versions may add some."""

    def close(self, status: str) -> None:
        """status: "done", "interrupted" or "failed"."""
        return


def _accept(output_dir: Path, options: Any) -> None:
    """Check nothing."""


@dataclass(frozen=True, kw_only=True)
class LoggerDef(Definition, Generic[Options]):
    """A destination of reports.

    open    (info, options) -> Logger. Called before the first step. Raises ConfigError if the user must act.
    check   (output_dir, options) -> None. Called before model and data are read, which may take hours. Raises
            ConfigError for what `open` would refuse, such as a missing address, and writes nothing
    always  open it in every run, not only if `report_to` names it
    """

    name: Name
    summary: str
    options: type[Options] = NoOptions  # type: ignore[assignment]
    open: Callable[[RunInfo, Options], Logger]
    check: Callable[[Path, Options], None] = _accept
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class SystemInfo:
    """The machine, for the checks of `surogate doctor`."""

    python: str
    platform: str
    cpu_count: int
    memory_bytes: int
    gpus: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One line of `surogate doctor`. `level` is "ok", "warning" or "error"; `remedy` is empty if it is "ok"."""

    level: str
    subject: str
    message: str
    remedy: str = ""
