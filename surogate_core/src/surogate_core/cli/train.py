"""`surogate train`, `pt` and `sft`."""

from __future__ import annotations

from pathlib import Path

from .. import run
from ..config import Mode
from ..summary import final_summary


def train_command(config: Path, overrides: list[str], mode: Mode) -> int:
    """Train as the YAML file says; 130 or 143 when a signal ended the run after saving."""
    result = run.train(run.load(config, overrides, mode), _say)
    _say(_summary(result))
    return result.signal_exit


def _summary(result: run.TrainResult) -> str:
    """What the run made. Bits per byte and the unigram loss only stand beside an evaluation that they belong to."""
    best = min(result.evaluations, key=lambda entry: entry[1], default=None)
    last = result.evaluations[-1] if result.evaluations else None
    interrupted = bool(result.signal_exit)
    return final_summary(
        run_name=result.run_name,
        status="interrupted" if interrupted else "done",
        step=result.steps,
        total_steps=result.total_steps,
        tokens=result.tokens,
        seconds=result.seconds,
        train_loss=result.loss,
        eval_loss=last[1] if last else None,
        best_eval_loss=best[1] if best else None,
        best_eval_step=best[0] if best else None,
        unigram_loss=result.unigram_loss if last else None,
        bits_per_byte=result.bits_per_byte,
        output_dir=result.output_dir,
        checkpoint=result.checkpoint_dir / f"step_{result.steps:08d}" if interrupted else result.output_dir,
    )


def _say(line: str) -> None:
    print(line, flush=True)
