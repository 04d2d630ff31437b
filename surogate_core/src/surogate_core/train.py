"""The training step, and the loop over steps: batches in, finished steps out.

Read from the top: `train` is the loop, `launch` enqueues a step, `finish` waits for it. Nothing here reads or writes a
file. What happens between two steps (an evaluation, a save, a stop) is a `Duty` that the caller brings.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Field

from .api import StepReport
from .batch import StepBatch

if TYPE_CHECKING:
    from .runtime.readings import Reading
    from .runtime.team import AnyWorker

SHORTEST_SECONDS = 1e-6
"""Shortest reported time of a step. Keeps tokens per second finite if the clocks of host and device disagree."""

Count = Annotated[int, Field(ge=0)]
MAX_STEP = 2**31 - 1
MAX_FP32 = 3.4e38
"""Largest values of the program inputs `step` (int32) and `lr` (fp32)."""


@dataclass
class Progress:
    """Counts and results of a training, from its first step on, resumed or not.

    step       optimizer steps finished and reported
    launched   optimizer steps launched, finished or not
    loss       of the last finished step; None before the first
    tokens     of all finished steps
    seconds    of all finished steps
    nonfinite  last steps in a row without a finite loss and gradient
    lr         learning rate of the last launched step
    """

    step: Annotated[int, Field(ge=0, le=MAX_STEP)] = 0
    launched: int = 0
    loss: float | None = None
    tokens: Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    nonfinite: Count = 0
    lr: Annotated[float, Field(ge=0, le=MAX_FP32)] = 0.0


class Duty(Protocol):
    """A thing that the caller does between two steps, such as to evaluate or to save."""

    def due(self, progress: Progress) -> bool:
        """Return whether it is due after step `progress.launched`, which the device may still be running.

        Called once after every launch. In a run of several processes all of them must answer alike.
        """

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        """Do it. The step has finished and is reported. Return whether the training ends here."""


def train(
    worker: AnyWorker,
    batches: Iterable[StepBatch],
    rate: Callable[[int], float],
    progress: Progress,
    report: Callable[[Finished], None],
    duties: Sequence[Duty] = (),
) -> None:
    """Train a step on each of `batches`, from `progress` on, which is updated in place.

    rate    learning rate of a step; the first step is 1
    report  called with every step, in order
    duties  in the order in which they are done if several are due. One that ends the training is the last.

    A step is finished after the next one is launched, so that the device never waits for the host; at once if the
    device has finished it already, and before a duty.
    """
    unfinished: Launched | None = None
    since = time.perf_counter()
    for batch in batches:
        launched = launch(worker, batch, rate, progress)
        if unfinished is not None:
            since = finish(unfinished, progress, since, report)
        unfinished = launched
        due = [duty for duty in duties if duty.due(progress)]
        if due or launched.reading.ready:
            since, unfinished = finish(launched, progress, since, report), None
        if any(duty(worker, progress) for duty in due):
            return
        if due:
            since = time.perf_counter()
    if unfinished is not None:
        finish(unfinished, progress, since, report)


# ------------------------------------------------------------------------------------------------------------ one step


class Table(Protocol):
    """The figures of a numerics report that the device may still be computing."""

    def values(self) -> list[list[float]] | None:
        """Wait for them. None if the step calibrated, which a report cannot describe."""


@dataclass(frozen=True)
class Launched:
    """An optimizer step that the device may still be running. `step` counts from 1."""

    step: int
    batch: StepBatch
    lr: float
    reading: Reading
    table: Table | None


def launch(worker: AnyWorker, batch: StepBatch, rate: Callable[[int], float], progress: Progress) -> Launched:
    progress.launched += 1
    step = progress.launched
    lr = progress.lr = rate(step)
    reading = optimizer_step(worker, batch, step, lr)
    return Launched(step, batch, lr, reading, worker.read_numerics() if batch.reports_numerics else None)


def optimizer_step(worker: AnyWorker, batch: StepBatch, step: int, lr: float) -> Reading:
    """Enqueue forward and backward pass of every micro-batch of this process, then the update. A team takes `width` at
    a time. Micro-batches are counted over all processes. Nothing here waits for the device."""
    units = {"loss_scale": batch.valid_tokens, "group_scale": batch.groups}
    scales = {name: 1 / count if count else 0.0 for name, count in units.items()}
    width, count = worker.width, len(batch.micro)
    for at in range(0, count, width):
        first, last = at == 0, at + width == count
        index = ((step - 1) * count + at) // width * worker.world_size
        micro = batch.micro[at : at + width]
        reporting = batch.reports_numerics and first
        worker.micro_step(*micro, first=first, last=last, index=index, reporting=reporting, **scales)
    return worker.update(lr=lr, step=step)


@dataclass(frozen=True)
class Finished:
    """An optimizer step that the device has finished.

    report   of the step, without metrics
    figures  values of `Assembly.reported` after the loss, from which metrics are computed
    """

    launched: Launched
    report: StepReport
    figures: Sequence[Any]


def finish(done: Launched, progress: Progress, since: float, report: Callable[[Finished], None]) -> float:
    """Wait for a launched step, report it, and return when the device finished it.

    `since`: when the device finished the step before, or when the loop continued after a duty. The time of a step ends
    when the device finished it, not at this call, which is often much later: after the launch of the next step.
    """
    loss, norm, *figures = done.reading.values()
    finished_at = done.reading.finished_at
    seconds = max(finished_at - since, SHORTEST_SECONDS)
    progress.step = done.step
    progress.nonfinite = 0 if math.isfinite(norm) and math.isfinite(loss) else progress.nonfinite + 1
    progress.loss = loss
    progress.tokens += done.batch.tokens
    progress.seconds += seconds
    step_report = StepReport(
        step=done.step,
        epoch=done.batch.epoch,
        loss=loss,
        norm=norm,
        lr=done.lr,
        tokens=done.batch.tokens,
        valid_tokens=done.batch.valid_tokens,
        tokens_per_second=done.batch.tokens / seconds,
        duration_ms=seconds * 1000,
        time=time.time(),
        skipped=not math.isfinite(norm),
        groups=done.batch.groups,
        groups_per_second=done.batch.groups / seconds,
    )
    report(Finished(done, step_report, figures))
    return finished_at
