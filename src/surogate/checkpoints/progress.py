"""Progress of a run: updated by the loop, saved in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0)]
MAX_STEP = 2**31 - 1
MAX_FP32 = 3.4e38
"""Largest values of the program inputs `step` (int32) and `lr` (fp32)."""


@dataclass
class Progress:
    """Counts and results of a run, from its first step on, resumed or not.

    step         optimizer steps finished and reported
    launched     optimizer steps launched, finished or not
    loss         of the last finished step; None before the first
    tokens       of all finished steps
    seconds      of all finished steps
    saved        the step of the last checkpoint
    nonfinite    last steps in a row without a finite loss and gradient
    lr           learning rate of the last launched step; older checkpoints have none
    evaluations  (step, mean loss, labels) of each evaluation
    """

    step: Annotated[int, Field(ge=0, le=MAX_STEP)] = 0
    launched: int = 0
    loss: float | None = None
    tokens: Count = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    saved: int = 0
    nonfinite: Count = 0
    lr: Annotated[float, Field(ge=0, le=MAX_FP32)] = 0.0
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
