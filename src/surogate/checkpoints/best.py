"""The best evaluation of a run so far, and how long ago it was. Checkpoints have it: a resumed run stops alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Best:
    """The best evaluation so far by one metric.

    metric    its name, as evaluations report it
    greatest  whether the greatest value is the best, or the least
    step      of the best evaluation, after which a checkpoint was saved; 0: there is none yet
    value     of the metric then
    waited    evaluations in a row that were not better than the best before them by more than the threshold
    folder    of the checkpoint, if another run than this one has written it: "" is the run's own `checkpoint_dir`
    """

    metric: str
    greatest: bool
    step: Count = 0
    value: float = 0.0
    waited: Count = 0
    folder: str = ""

    def after(self, step: int, value: float, threshold: float) -> Best:
        """Return the best after one more evaluation. An equal value is no better one, and NaN never is.

        As in transformers' `Trainer` with `EarlyStoppingCallback`: a value that is better by no more than `threshold`
        is the best from now on, and yet counts as waited for.
        """
        beyond = value > self.value if self.greatest else value < self.value
        better = math.isfinite(value) and (beyond or not self.step)
        enough = better and (not self.step or abs(value - self.value) > threshold)
        found = replace(self, step=step, value=value, folder="") if better else self
        return replace(found, waited=0 if enough else self.waited + 1)

    @property
    def order(self) -> str:
        return "greatest" if self.greatest else "least"

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.4f}"
