"""How far a run has come: what the loop keeps up to date and a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Progress:
    """Where the loop stands, and where it ended.

    step: optimizer steps done and reported; launched: those under way too; lr: that of the last launched. nonfinite:
    steps in a row without a finite loss and gradient. evaluations: (step, mean loss in nats, labels). All of it counts
    from the run's first step, resumed or not.
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
