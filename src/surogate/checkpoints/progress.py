"""Progress of a run: updated by the loop, saved in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from surogate_core import train


@dataclass
class Progress(train.Progress):
    """Progress of a training, with what the program does between its steps. Older checkpoints have no `lr`.

    saved        the step of the last checkpoint
    evaluations  (step, mean loss, labels) of each evaluation
    sampled      the step after which samples were last written; -1: none were. Older checkpoints have none.
    """

    saved: int = 0
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
    sampled: Annotated[int, Field(ge=-1, le=train.MAX_STEP)] = -1
