"""Sums of the figures of evaluated batches, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.api.models import Unit
from surogate_core.batch import MicroBatch, StepBatch

from ..world.processes import Processes

if TYPE_CHECKING:
    from surogate_core.assembly.assembly import Reported
    from surogate_core.runtime.team import AnyWorker


@dataclass(frozen=True)
class Sums:
    """The sums of the loss and the other figures over batches, and the labels and groups of these."""

    totals: Sequence[Any]
    labels: int
    groups: int

    def mean(self, total: Any, per: Unit) -> Any:
        return total / max(1, self.labels if per == "token" else self.groups)


def prepass(
    means: Sequence[str],
    batches: Iterable[Sequence[MicroBatch]],
    worker: AnyWorker,
    reported: Sequence[Reported],
    processes: Processes,
) -> dict[str, float]:
    """Run the prepass of the loss, on all ranks. Return the inputs of micro-steps that hold the figures `means`."""
    before = ([one.before for one in some if one.before] for some in batches)
    sums = sum_losses(worker, before, processes, "the end of the prepass of the loss")
    every = zip(reported, sums.totals, strict=bool(sums.totals))
    found = {figure.name: sums.mean(total, figure.per) for figure, total in every}
    return {f"mean.{name}": found[name] for name in means if found}


def with_means(
    means: Sequence[str], batch: StepBatch, worker: AnyWorker, reported: Sequence[Reported], processes: Processes
) -> StepBatch:
    """Return the batch of a step after its prepass, if the loss has one."""
    if not means:
        return batch
    width, micro = worker.width, batch.micro
    together = (micro[at : at + width] for at in range(0, len(micro), width))
    found = prepass(means, together, worker, reported, processes)
    return replace(batch, micro=[one.given(found) for one in micro])


def sum_losses(worker: AnyWorker, batches: Iterable[Sequence[MicroBatch]], processes: Processes, what: str) -> Sums:
    """Return the sums over all processes, which meet at `what`. `batches`: one for each of its ranks, repeatedly."""
    totals: list[Any] = []
    labels = groups = 0
    for together in batches:
        found = worker.evaluate(*together)
        totals = [total + value for total, value in zip(totals or [0.0] * len(found), found, strict=True)]
        labels += sum(batch.n_valid for batch in together)
        groups += sum(batch.n_groups for batch in together)
    every = processes.gather([[np.asarray(total).tolist() for total in totals], labels, groups], what)
    by_figure = zip(*(totals for totals, *_ in every), strict=True)
    summed = [sum(map(np.array, values), np.zeros(())) for values in by_figure]
    return Sums(summed, sum(n for _, n, _ in every), sum(n for *_, n in every))
