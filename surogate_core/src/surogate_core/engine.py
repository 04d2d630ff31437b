"""Trains definitions on batches, without a file, a config or a command line: the first entry for researchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .api import StepReport
from .assembly.assembly import Assembly, metrics_of
from .batch import StepBatch, next_token_batch
from .definitions import Definitions
from .errors import ConfigError
from .planning.plan import Plan
from .runtime.device import training_device
from .runtime.initialize import initialize
from .runtime.team import AnyWorker
from .runtime.workers import make_worker
from .train import Duty, Finished, Progress, train


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    progress  steps, tokens and seconds, and the last loss
    weights   {name of a param: tensor in the memory of the host}, in the dtype of the model
    plan      the programs that ran, and the memory and the time that they were planned to take
    """

    progress: Progress
    weights: Mapping[str, Tensor]
    plan: Plan


def train_from(
    definitions: Definitions,
    batches: Iterable[npt.NDArray[Any] | StepBatch],
    learning_rate: float | Callable[[int], float],
    *,
    row_length: int | None = None,
    weights: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    report: Callable[[StepReport], None] = lambda report: None,
    duties: Sequence[Duty] = (),
    notice: Callable[[str], None] = print,
) -> Trained:
    """Train a step on each batch, on the first visible GPU, or on the CPU if there is none.

    batches        ids of tokens of a step each: arrays as `next_token_batch` reads them, all of one shape. Or
                   `StepBatch`es, for documents in rows, masks and what else a loss reads, with their `row_length`
    learning_rate  of all steps, or a function of the step, which counts from 1
    weights        the weights to begin with, {name of a param: tensor}. Others are drawn by their `Init` with `seed`,
                   which also seeds stochastic rounding
    report         called with every step, in order, when the next one is already launched
    duties         what is done between two steps, such as to evaluate, or to stop
    notice         called with lines for the user

    A step whose gradient is not finite changes nothing; its report says `skipped`. The same arguments give the same
    bits on the same device, as far as `deterministic` asks for it.

    Raises ConfigError for definitions, batches or weights that cannot be used, naming them; PluginError for a
    definition that is wrong; what an iterator, a report or a duty raises.
    """
    given = iter(batches)
    first = next(given, None)
    if first is None:
        raise ConfigError("batches: there is none. Give an array of token ids, or a StepBatch, for each step.")
    if isinstance(first, np.ndarray):
        row_length = first.shape[-1] if first.ndim else 0
    elif row_length is None:
        raise ConfigError("row_length: is needed with StepBatches. Give the number of tokens in a row.")
    shape = _step(first)
    plan = definitions.plan(shape, row_length, training_device())
    _refuse_missing_inputs(plan, shape)
    steps = _steps(chain([first], given), shape, plan.inputs.dims.vocab_size)
    rate = learning_rate if callable(learning_rate) else lambda step: learning_rate
    worker = make_worker(
        plan.assembly,
        plan.inputs.ops,
        plan.target,
        seed,
        notice=notice,
        allow_reference=definitions.allow_reference,
    )

    def report_step(done: Finished) -> None:
        report(replace(done.report, metrics=metrics_of(plan.assembly.reported, done.figures)))

    try:
        _fill(worker, plan.assembly, weights or {}, seed)
        worker.start(graphs=plan.gains_by_graphs)
        progress = Progress()
        train(worker, steps, rate, progress, report_step, duties)
        worker.settle()
        return Trained(progress, {name: held.cpu().clone() for name, held in worker.params().items()}, plan)
    finally:
        worker.close()


def _step(given: npt.NDArray[Any] | StepBatch) -> StepBatch:
    return given if isinstance(given, StepBatch) else next_token_batch(given)


def _steps(batches: Iterable[npt.NDArray[Any] | StepBatch], shape: StepBatch, vocab_size: int) -> Iterator[StepBatch]:
    """Yield the batches of all steps. Raises ConfigError for one of another shape, or a token that the model lacks."""
    for index, given in enumerate(batches):
        batch = _step(given)
        if _shape(batch) != _shape(shape):
            raise ConfigError(
                f"batch {index}: has another shape than the first one. Steps are planned for one shape; pad it."
            )
        for micro in batch.micro:
            lowest, highest = micro.tokens.min(), max(micro.tokens.max(), micro.targets.max())
            if lowest < 0 or highest >= vocab_size:
                found = lowest if lowest < 0 else highest
                raise ConfigError(f"batch {index}: token {found} is not among the {vocab_size} of the model.")
        yield batch


def _shape(batch: StepBatch) -> list[tuple[int, int]]:
    return [(len(micro.tokens), len(micro.cu_seqlens)) for micro in batch.micro]


def _refuse_missing_inputs(plan: Plan, shape: StepBatch) -> None:
    """Raise ConfigError if the loss reads what the batches do not hold."""
    read, loss = plan.assembly.batch, plan.inputs.loss
    if loss.prepass:
        raise ConfigError(f"loss: {loss.name} reads means of a prepass, which train_from does not run. Use surogate.")
    asked = [*(["groups"] if read.groups is not None else []), *(f"column.{name}" for name in read.columns)]
    if lacking := [name for name in asked if name not in shape.micro[0].asked]:
        raise ConfigError(
            f"loss: {loss.name} reads {', '.join(lacking)}. Give StepBatches whose micro-batches have it in `asked`."
        )


def _fill(worker: AnyWorker, assembly: Assembly, weights: Mapping[str, Tensor], seed: int) -> None:
    """Fill params and states as the training begins. Raises ConfigError for weights that are not the model's."""
    params = worker.params()
    if unknown := sorted(weights.keys() - params.keys()):
        raise ConfigError(f"weights: {unknown[0]} is no param of the model, which has {', '.join(sorted(params))}.")
    initialize((v for v in assembly.declared if v.init and v.name not in weights), worker.buffers.persistent, seed)
    for name, tensor in weights.items():
        if tensor.shape != params[name].shape:
            wanted = list(params[name].shape)
            raise ConfigError(f"weights: {name} is {list(tensor.shape)}, but the model's is {wanted}.")
        params[name].copy_(tensor)
