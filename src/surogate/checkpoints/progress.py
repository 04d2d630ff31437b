"""Progress of a run: updated by the loop, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import Field

from surogate_core import train

from .best import Best


@dataclass
class Progress(train.Progress):
    """Progress of a training, with what the program does between its steps. Older checkpoints have no `lr`.

    saved        the step of the last checkpoint
    evaluations  (step, mean loss, labels) of each evaluation
    best         the best one; None: the run does not look for it
    sampled      the step after which samples were last written; -1: none were. Older checkpoints have none.
    """

    saved: int = 0
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
    best: Best | None = None
    sampled: Annotated[int, Field(ge=-1, le=train.MAX_STEP)] = -1

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the progress of which `dataclasses.asdict` has made these values."""
        best = values["best"]
        return cls(**{**values, "best": best and Best(**best)})

    def weights_step(self, loads_best: bool) -> int:
        """Return the step whose weights the outputs have: the last one, or with `loads_best` that of the best."""
        return self.best.step if loads_best and self.best and self.best.step else self.step

    def loss_at(self, step: int) -> float | None:
        """Return the loss of the evaluation after a step; None if there was none."""
        return next((loss for at, loss, _ in reversed(self.evaluations) if at == step), None)
