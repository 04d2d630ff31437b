"""`surogate train`, `pt` and `sft`."""

from __future__ import annotations

import sys

from .. import run
from ..errors import RunStopped
from ..machine.timing import mark
from ..reporting.summary import print_summary
from .options import RunArguments
from .render import print_error


def train_command(arguments: RunArguments, fit: str | None = None) -> int:
    """Train a run, with the fastest settings for the target `fit` if there is one (see `run.fit`).

    Return 130 or 143 if a signal ended it after a save, 3 if a push failed, else 0.
    """
    mark("command line")
    loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
    mark("config, plugins")
    if fit is not None:
        from .fit import fitted

        loaded = fitted(arguments, loaded, fit)
        mark("fit")
    result = run.train(loaded, _say)
    if result.signal_exit:
        saved = result.checkpoint_dir / f"step_{result.steps:08d}"
        _say(f"interrupted after step {result.steps:,} of {result.total_steps:,}; saved: {saved}")
    else:
        _print_summary(result)
        if result.pushed and result.pushed.url:
            _say(f"pushed to {result.pushed.url}")
        elif result.pushed:
            print_error(result.pushed.error)
            return RunStopped.exit_code
    return result.signal_exit


def _print_summary(result: run.TrainResult) -> None:
    losses = [loss for _, loss, _ in result.evaluations]
    print_summary(
        sys.stdout,
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
        weights=_weights(result),
        commands=result.commands,
    )


def _weights(result: run.TrainResult) -> str:
    """Return what was trained and in which folder of the output it is."""
    if result.adapter_dir is None:
        return "the model"
    parts = [f"the adapter in {result.adapter_dir.name}"]
    if result.merged_dir is not None:
        parts.append(f"base and adapter in {result.merged_dir.name}")
    return ", ".join(parts)


def _say(line: str) -> None:
    print(line, flush=True)
