"""What a value may look like, and what the error says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from config.harness import FakeRegistry, config, load, message

from surogate.config.load import load_config, resolved


def test_numbers_and_bools_may_be_text() -> None:
    c = config(learning_rate="2e-4", num_epochs="2", max_steps="1e3", save_steps=5.0, from_scratch="True")
    assert (c.learning_rate, c.num_epochs, c.max_steps, c.save_steps, c.from_scratch) == (2e-4, 2, 1000, 5, True)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_epochs", True, "must be a number"),
        ("num_epochs", 0, "above 0"),
        ("num_epochs", "-0.5", "above 0"),
        ("num_epochs", 10**30, "at most"),
        ("max_steps", True, "whole number"),
        ("max_steps", 1.5, "whole number"),
        ("eval_steps", 1.5, "a whole number of steps, or a part of the run's steps below 1"),
        ("save_steps", -1, "a whole number of steps, or a part"),
        ("save_strategy", "never", "'steps', 'epoch', 'best' or 'no'"),
        ("eval_strategy", "best", "'steps', 'epoch' or 'no'"),
        ("evals_per_epoch", 0, "at least 1"),
        ("early_stopping_patience", 0, "at least 1"),
        ("early_stopping_threshold", -0.1, "at least 0"),
        ("per_device_train_batch_size", 0, "at least 1"),
        ("learning_rate", True, "number"),
        ("learning_rate", "nan", "finite"),
        ("learning_rate", float("inf"), "finite"),
        ("learning_rate", -1, "at least 0"),
        ("learning_rate", 10**400, "number"),
        ("warmup_ratio", 1.01, "at most 1"),
        ("warmup_ratio", "ten", "number"),
        ("from_scratch", 1, "true or false"),
        ("from_scratch", "maybe", "true or false"),
        ("deterministic", "maybe", "auto, true or false"),
        ("deterministic", 1, "auto, true or false"),
        ("deterministic", ["auto"], "auto, true or false"),
        ("train_seed", -1, "at least 0"),
        ("lr_scheduler_type", "greedy", "'linear', 'cosine', 'wsd', 'constant'"),
        ("lr_scheduler_kwargs", "num_cycles=2", "must be a mapping"),
        ("model", "", "empty"),
        ("model", 1.5, "quotes"),
        ("output_dir", "a\0b", "control"),
        ("lmhead_chunks", "many", "auto or a whole number"),
        ("lmhead_chunks", 0, "at least 1"),
        ("lmhead_chunks", 3, "does not divide the 2048 tokens of a micro-step (per_device_train_batch_size x"),
        ("lmhead_chunks", 3, "use auto, or a divisor of them"),
        ("weight_decay", 1e300, "at most 1e+38"),
        ("datasets", 5, "list of entries"),
        ("datasets", [5], "must be a path, or a mapping with one"),
        ("datasets", [{"type": "text"}], "datasets.0.path: is required"),
        ("model_dtype", "fp16", "'fp32' or 'bf16'"),
        ("matmul_dtype", "e5m2", "'fp32', 'bf16', 'e4m3' or 'e2m1'"),
        ("gradient_dtype", "fp16", "'fp32', 'bf16', 'e5m2' or 'e2m1'"),
        ("report_to", 3, "name or a list"),
        ("recipe", ["bf16"], "must be a name"),
        ("max_model_len", 512, "above max_model_len 512"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(key: str, value: Any, says: str) -> None:
    text = message(**{key: value})
    assert text.startswith("run.yaml: ") and key in text and says in text
    assert len(text.splitlines()) == 1


def test_deterministic_is_auto_true_or_false_as_a_bool_or_a_word() -> None:
    assert config().deterministic == config(deterministic="Auto").deterministic == "auto"
    assert config(deterministic=True).deterministic == config(deterministic="yes").deterministic == "true"
    assert config(deterministic=False).deterministic == config(deterministic="off").deterministic == "false"
    for word in ("auto", "true", "false"):
        loaded = load(deterministic=word)
        assert load_config(resolved(loaded), registry=FakeRegistry(), source="run.yaml") == loaded


def test_a_path_is_short_for_an_entry_and_for_a_list_of_one() -> None:
    whole = load(datasets=[{"path": "a.jsonl", "type": "auto"}]).config.datasets
    assert load(datasets="a.jsonl").config.datasets == load(datasets=["a.jsonl"]).config.datasets == whole
    assert load(validation_datasets="a.jsonl").config.validation_datasets == whole


def test_names_fold_case_and_hyphens() -> None:
    c = config(
        recipe="BF16", optimizer="AdamW", lr_scheduler_type="WSD", report_to="My_Board", kernels="allow-reference"
    )
    assert (c.recipe, c.optimizer, c.lr_scheduler_type, c.report_to) == ("bf16", "adamw", "wsd", ("my-board",))
    assert c.kernels == "allow_reference"
    assert config(datasets=[{"path": "x", "type": "TEXT"}]).datasets[0].type == "text"


def test_environment_variables_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_HOME", "/data")
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.delenv("NOT_SET", raising=False)
    c = config(output_dir="${DATA_HOME}/o$$1", max_steps="$STEPS", datasets=[{"path": "$DATA_HOME/a.txt"}])
    assert (c.output_dir, c.max_steps, c.datasets[0].path) == ("/data/o$1", 7, "/data/a.txt")
    assert "output_dir: the environment variable NOT_SET is not set" in message(output_dir="$NOT_SET/x")
    assert "names no environment variable" in message(output_dir="${}")
