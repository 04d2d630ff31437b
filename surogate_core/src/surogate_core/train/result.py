"""What a run tells whoever started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..outputs.push import Pushed


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. Losses are means over labels, in nats; None when there was nothing to take them from.

    loss: of the last step. evaluations: (step, loss, labels), in order. unigram_loss: of a model that knows only how
    often each token occurs, on the validation set. bits_per_byte: of the last evaluation, if it saw the whole set.
    signal_exit: 0, or 130 or 143 when a signal ended the run. adapter_dir, merged_dir: None where there is none.
    commands: (program, the line that loads the result there). pushed: None where nothing was to be pushed.
    """

    run_name: str
    output_dir: Path
    checkpoint_dir: Path
    steps: int
    total_steps: int
    tokens: int
    seconds: float
    loss: float | None
    evaluations: tuple[tuple[int, float, int], ...]
    unigram_loss: float | None
    bits_per_byte: float | None
    signal_exit: int
    adapter_dir: Path | None = None
    merged_dir: Path | None = None
    commands: tuple[tuple[str, str], ...] = ()
    pushed: Pushed | None = None
