"""`surogate train`, `pt` and `sft`."""

from __future__ import annotations

from pathlib import Path

from .. import run
from ..config import Mode
from ..summary import final_summary


def train_command(config: Path, overrides: list[str], mode: Mode) -> int:
    """Train as the YAML file says; 130 or 143 when a signal ended the run after saving."""
    result = run.train(run.load(config, overrides, mode), _say)
    if result.signal_exit:
        saved = result.checkpoint_dir / f"step_{result.steps:08d}"
        _say(f"interrupted after step {result.steps:,} of {result.total_steps:,}; saved: {saved}")
    else:
        _say(_summary(result))
    return result.signal_exit


def _summary(result: run.TrainResult) -> str:
    losses = [loss for _, loss, _ in result.evaluations]
    return final_summary(
        run_name=result.run_name,
        steps=result.steps,
        tokens=result.tokens,
        seconds=result.seconds,
        training_loss=result.loss,
        validation_loss=losses[-1] if losses else None,
        best_validation_loss=min(losses, default=None),
        unigram_loss=result.unigram_loss if losses else None,
        bits_per_byte=result.bits_per_byte,
        output_dir=result.output_dir,
        **_where(result),
    )


def _where(result: run.TrainResult) -> dict[str, str]:
    """What is said of an adapter: a full model is where the summary expects it."""
    if result.adapter_dir is None:
        return {}
    parts = [f"the adapter in {result.adapter_dir.name}"]
    if result.merged_dir is not None:
        parts.append(f"base and adapter in {result.merged_dir.name}")
    loader = "peft.AutoPeftModelForCausalLM"
    return {"weights": ", ".join(parts), "load": f"{loader}.from_pretrained({str(result.adapter_dir)!r})"}


def _say(line: str) -> None:
    print(line, flush=True)
