"""The result of a training run, as `run.train` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..outputs.push import Pushed
    from .packing_check import PackingCheck


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation of a run: the step before it, and the metric by which it is the best."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run. Losses are means over labels or groups of documents (`StepReport.loss`).

    loss          of the last step; None without a step
    evaluations   (step, loss, labels), in order
    in_nats       losses are cross-entropies per token
    unigram_loss  on the validation set, of a model that knows only how often each token occurs; None without a set, or
                  if losses are not in nats
    bits_per_byte of the last evaluation; None unless it read the whole validation set
    writer        whether this process has written it: of several processes, one has
    signal_exit   0, or 130 or 143 when a signal ended the run
    adapter_dir   None when all weights are trained, and when a signal ended the run before it wrote outputs
    merged_dir    None without a merged model
    commands      (program, line): the lines that load the outputs; none when a signal ended the run
    pushed        the upload; None when none was asked for
    mfu           model FLOPs utilization of all steps; None if the devices' peak is not known
    group         what the loss has groups of, "pairs" for example; "" if it has none
    groups_per_second
                  of the steps of this process
    headlines     names of the metrics that a summary shows
    step_metrics  of the last step of this process, by name
    evaluation_metrics
                  of its last evaluation, by name; with load_best_model_at_end of the best one
    packing       losses of documents packed and alone, before step one; None if no row has two, or by check_finite
    weights_step  the step whose weights the outputs have
    best          the best evaluation; None if the run did not look for it, or none was finite
    stop_reason   why the run ended before its last step, by itself or by a callback; "" if it did not, or by a signal
    """

    run_name: str
    output_dir: Path
    checkpoint_dir: Path
    steps: int
    total_steps: int
    tokens: int
    seconds: float
    loss: float | None
    evaluations: tuple[tuple[int, float, int], ...]
    unigram_loss: float | None
    bits_per_byte: float | None
    signal_exit: int
    writer: bool = True
    adapter_dir: Path | None = None
    merged_dir: Path | None = None
    in_nats: bool = True
    commands: tuple[tuple[str, str], ...] = ()
    pushed: Pushed | None = None
    packing: PackingCheck | None = None
    weights_step: int = 0
    best: BestEvaluation | None = None
    stop_reason: str = ""
    mfu: float | None = None
    group: str = ""
    groups_per_second: float = 0.0
    headlines: tuple[str, ...] = ()
    step_metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation_metrics: Mapping[str, float] = field(default_factory=dict)
