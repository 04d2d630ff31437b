"""Progress of a run: updated by the loop, saved in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    lr           learning rate of the last launched step
    evaluations  (step, mean loss, labels) of each evaluation
    """

    step: int = 0
    launched: int = 0
    loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    saved: int = 0
    nonfinite: int = 0
    lr: float = 0.0
    evaluations: list[tuple[int, float, int]] = field(default_factory=list)
