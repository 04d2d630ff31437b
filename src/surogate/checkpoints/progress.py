"""Progress of a run: updated by the loop, saved in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from surogate_core import train


@dataclass
class Progress(train.Progress):
    """Progress of a training, with what the program does between its steps. Older checkpoints have no `lr`.

    saved        the step of the last checkpoint
    evaluations  (step, mean loss, labels) of each evaluation
    """

    saved: int = 0
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
