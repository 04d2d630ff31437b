"""`surogate train`, `pt` and `sft`."""

from __future__ import annotations

import sys
from pathlib import Path


def train_command(config: Path, overrides: list[str], mode: str) -> int:
    """Train as the YAML file says; 130 or 143 when a signal ended the run after saving."""
    from .. import run
    from ..metrics import final_summary

    result = run.train(run.load(config, overrides, mode), _say)  # type: ignore[arg-type]
    if result.signal_exit:
        _say(f"interrupted after step {result.steps}; saved. The checkpoints are in {result.output_dir}")
        return result.signal_exit
    print(
        final_summary(
            steps=result.steps,
            tokens=result.tokens,
            seconds=result.seconds,
            validation_loss=result.loss,
            best_validation_loss=result.best_loss,
            unigram_loss=result.unigram_loss,
            bits_per_byte=result.bits_per_byte,
            output_dir=result.output_dir,
        )
    )
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
