"""Rules between the keys that say when a run evaluates and saves, which evaluation is the best, and when it stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import Findings
from .schema import TrainConfig

_DEFAULT_STEPS = {what: TrainConfig.model_fields[f"{what}_steps"].default for what in ("eval", "save")}


def apply_best_rules(config: TrainConfig, findings: Findings) -> dict[str, Any]:
    """Check the rules. Return the values that follow for keys that are null."""
    for what in ("eval", "save"):
        _check_cadence(config, what, findings)
    if config.eval_delay % 1 and not config.counts_epochs:
        findings.wrong(
            "eval_delay", f"is {config.eval_delay:g}, but counts steps; use a whole number, or eval_strategy: epoch"
        )
    _check_best(config, findings)
    implied: dict[str, Any] = {}
    if config.load_best_model_at_end is None:
        implied["load_best_model_at_end"] = config.early_stopping_patience is not None
    return implied


def _check_cadence(config: TrainConfig, what: str, findings: Findings) -> None:
    """Refuse keys that say twice when to evaluate, or to save. A run that is resolved has the defaults of all keys."""
    strategy, steps = getattr(config, f"{what}_strategy"), getattr(config, f"{what}_steps")
    times = getattr(config, f"{what}s_per_epoch")
    other_steps = steps not in (0, _DEFAULT_STEPS[what])
    if times is not None and strategy != "steps":
        findings.wrong(f"{what}s_per_epoch", f"is {times}, but {what}_strategy is {strategy}; keep one of these keys")
    elif times is not None and other_steps:
        findings.wrong(f"{what}s_per_epoch", f"is {times}, but {what}_steps is {steps}; keep one of these keys")
    elif strategy != "steps" and other_steps:
        findings.wrong(f"{what}_steps", f"is {steps}, but {what}_strategy is {strategy}; keep one of these keys")


def _check_best(config: TrainConfig, findings: Findings) -> None:
    for key in _that_evaluate(config):
        if not config.validation_datasets and not config.validation_split_ratio:
            findings.wrong(
                key, "needs evaluations, but no data is held out; set validation_datasets or validation_split_ratio"
            )
        elif key != "eval_on_start" and not config.evaluates_between_steps:
            off = "eval_strategy is no" if config.eval_strategy == "no" else "eval_steps is 0"
            findings.wrong(
                key, f"needs evaluations between steps, but {off}; set eval_steps, evals_per_epoch or eval_strategy"
            )
    if config.load_best_model_at_end and config.save_strategy == "no":
        findings.wrong(
            "load_best_model_at_end", "needs the checkpoint of the best evaluation, but save_strategy is no; use best"
        )
    if config.early_stopping_threshold and config.early_stopping_patience is None:
        findings.wrong(
            "early_stopping_threshold", "has no effect without early_stopping_patience; set it, or remove the key"
        )
    if config.greater_is_better is not None and not config.looks_for_best:
        findings.wrong("greater_is_better", "has no effect without metric_for_best_model; set it, or remove the key")
    elif config.greater_is_better and config.best_metric == "loss":
        findings.wrong("greater_is_better", "is true, but the metric is the loss, of which the least is the best")


def _that_evaluate(config: TrainConfig) -> Iterator[str]:
    """Yield the keys that are set and mean nothing without evaluations."""
    if config.early_stopping_patience is not None:
        yield "early_stopping_patience"
    elif config.load_best_model_at_end:
        yield "load_best_model_at_end"
    elif config.save_strategy == "best":
        yield "save_strategy"
    elif config.metric_for_best_model is not None:
        yield "metric_for_best_model"
    if config.eval_delay:
        yield "eval_delay"
    if config.eval_on_start:
        yield "eval_on_start"
