"""Keys on evaluations, checkpoints, the best of them and early stopping: values, and rules between them."""

from __future__ import annotations

from typing import Any

import pytest
from config.harness import config, load, message

from surogate.config.load import load_config, resolved


def test_epochs_and_cadences_may_be_fractions_and_whole_numbers_stay_whole() -> None:
    c = config(num_epochs="0.5", eval_steps=0.25, save_steps="1e1")
    assert (c.num_epochs, c.eval_steps, c.save_steps) == (0.5, 0.25, 10)
    whole = config(num_epochs=2.0, eval_steps=20.0)
    assert [type(value) for value in (whole.num_epochs, whole.eval_steps)] == [int, int]


def test_no_may_be_a_word_or_what_other_readers_of_yaml_make_of_it() -> None:
    for word in ("no", False, "No"):
        assert config(eval_strategy=word, save_strategy=word).eval_strategy == "no"


@pytest.mark.parametrize(
    ("keys", "metric", "greatest"),
    [
        ({}, "loss", False),
        ({"metric_for_best_model": "eval_loss"}, "loss", False),
        ({"metric_for_best_model": "eval_rewards/accuracies"}, "rewards/accuracies", True),
        ({"metric_for_best_model": "nll_loss"}, "nll_loss", False),
        ({"metric_for_best_model": "divergence", "greater_is_better": False}, "divergence", False),
    ],
)
def test_the_metric_is_the_loss_unless_named_and_the_least_of_losses_is_best(
    keys: dict[str, Any], metric: str, greatest: bool
) -> None:
    c = config(**keys)
    assert (c.best_metric, c.greatest_is_best) == (metric, greatest)


def test_patience_implies_the_best_weights_unless_the_key_says_no() -> None:
    assert config(early_stopping_patience=3).load_best_model_at_end is True
    assert config(early_stopping_patience=3, load_best_model_at_end=False).load_best_model_at_end is False
    assert config().load_best_model_at_end is False and not config().looks_for_best
    assert config(save_strategy="best").looks_for_best


@pytest.mark.parametrize(
    "keys",
    [
        {"evals_per_epoch": 2, "saves_per_epoch": 4},
        {"eval_strategy": "epoch", "save_strategy": "best", "eval_delay": 0.5},
        {"early_stopping_patience": 2, "early_stopping_threshold": 0.01, "num_epochs": 0.5},
        {"eval_strategy": "no", "save_strategy": "no"},
    ],
)
def test_a_resolved_config_loads_as_it_was(keys: dict[str, Any]) -> None:
    loaded = load(**keys)
    from config.harness import FakeRegistry

    again = load_config(resolved(loaded), registry=FakeRegistry(), mode="train", source="run.yaml")
    assert again.config == loaded.config


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"evals_per_epoch": 2, "eval_steps": 20}, "evals_per_epoch: is 2, but eval_steps is 20; keep one"),
        ({"saves_per_epoch": 2, "save_steps": 0.5}, "saves_per_epoch: is 2, but save_steps is 0.5; keep one"),
        ({"eval_strategy": "epoch", "eval_steps": 20}, "eval_steps: is 20, but eval_strategy is epoch; keep one"),
        ({"save_strategy": "no", "saves_per_epoch": 1}, "saves_per_epoch: is 1, but save_strategy is no; keep one"),
        ({"early_stopping_patience": 1, "validation_split_ratio": 0}, "early_stopping_patience: needs evaluations,"),
        ({"eval_on_start": True, "validation_split_ratio": 0}, "eval_on_start: needs evaluations, but no data"),
        ({"load_best_model_at_end": True, "eval_strategy": "no"}, "load_best_model_at_end: needs evaluations be"),
        ({"save_strategy": "best", "eval_steps": 0}, "save_strategy: needs evaluations between steps, but"),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, "load_best_model_at_end: needs the checkpoint of"),
        ({"early_stopping_threshold": 0.1}, "early_stopping_threshold: has no effect without early_stopping_patience"),
        ({"eval_delay": 5, "eval_strategy": "no"}, "eval_delay: needs evaluations between steps, but"),
        ({"eval_delay": 0.5}, "eval_delay: is 0.5, but counts steps; use a whole number, or eval_strategy: epoch"),
        ({"greater_is_better": True}, "greater_is_better: has no effect without metric_for_best_model"),
        ({"metric_for_best_model": "loss", "greater_is_better": True}, "greater_is_better: is true, but the metric is"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_or_have_no_effect_are_refused(keys: dict[str, Any], says: str) -> None:
    text = message(**keys)
    assert says in text and "\n" not in text
