"""Defaults, and values that follow from other keys."""

from __future__ import annotations

from typing import Any

import pytest
from config.harness import WithAdapter, config, load, message

from surogate.config.load import resolved
from surogate.config.schema import TrainConfig
from surogate_core.errors import ConfigError


def test_defaults_are_the_decided_ones() -> None:
    c = config()
    assert (c.optimizer, c.recipe, c.sequence_len, c.lmhead_chunks, c.lora) == (
        "adamw_8bit",
        "bf16",
        1024,
        "auto",
        False,
    )
    assert (c.learning_rate, c.weight_decay, c.max_grad_norm, c.lr_scheduler_type) == (2e-4, 0.1, 1.0, "linear")
    assert (c.per_device_train_batch_size, c.gradient_accumulation_steps, c.num_epochs) == (2, 4, 3)
    assert (c.save_steps, c.save_total_limit, c.eval_steps, c.logging_steps) == (50, 5, 100, 1)
    assert (c.train_seed, c.eval_seed, c.validation_split_ratio, c.max_nonfinite_steps) == (1234, 1234, 0.1, 10)
    assert (c.datasets[0].type, c.datasets[0].split, c.recomputed_parts) == ("auto", "train", frozenset())


def test_folders_and_names_follow_the_output_folder_unless_set() -> None:
    c = config(output_dir="out/first")
    assert (c.resolved_run_name, c.resolved_checkpoint_dir) == ("first", "out/first")
    c = config(output_dir="out/first", run_name="r", checkpoint_dir="c")
    assert (c.resolved_run_name, c.resolved_checkpoint_dir) == ("r", "c")


def test_explicit_null_means_the_default() -> None:
    assert load(**dict.fromkeys(TrainConfig.model_fields.keys() - {"model", "datasets"})) == load()


def test_dtypes_take_the_names_of_torch_and_reach_the_precision_request() -> None:
    request = config(torch_dtype="bfloat16", master_dtype="float32", matmul_dtype="e4m3").precision_request
    assert (request.model_dtype, request.master_dtype, request.matmul_dtype) == ("bf16", "fp32", "e4m3")
    assert config(torch_dtype="auto").model_dtype is None
    assert "keep one" in message(torch_dtype="bf16", model_dtype="fp32")


def test_the_parts_that_are_recomputed_are_those_whose_key_is_true() -> None:
    assert config(recompute_block=True).recomputed_parts == {"block"}
    assert config(recompute_attention=True, recompute_swiglu=True).recomputed_parts == {"att", "swiglu"}
    assert config().recomputed_parts == config(recompute=False).recomputed_parts == frozenset()
    assert config(recompute=False, recompute_ffn=True).recomputed_parts == {"ffn"}


def test_recompute_is_auto_or_everything_or_what_the_keys_say() -> None:
    assert config().recompute == config(recompute="Auto").recompute == "auto"
    assert config(recompute=True).recomputed_parts == {"block"}
    assert config(recompute="none") == config(recompute="no") == config(recompute=False)
    assert "recompute: must be auto, true or false" in message(recompute="some")


def test_what_an_adapter_adds_is_recomputed_only_where_one_is_trained() -> None:
    assert load(recompute_lora=True).config.recomputed_parts == frozenset()
    registry = WithAdapter()
    assert load("sft", registry, recompute_lora=True).config.recomputed_parts == {"adapter"}
    assert load("sft", registry, recompute=True).config.recomputed_parts == {"adapter", "block"}
    assert load("sft", registry, recompute_block=True).config.recomputed_parts == {"block"}


@pytest.mark.parametrize(
    ("written", "nbytes", "resolved_as"),
    [
        ("24GiB", 24 << 30, "24GiB"),
        ("1.5 gib", 3 << 29, "1536MiB"),
        ("24GB", 24 * 10**9, 24 * 10**9),
        ("0.1GB", 10**8, 10**8),
        (2**30 + 1, 2**30 + 1, 2**30 + 1),
        ("1e9", 10**9, 10**9),
        ("4096", 4096, 4096),
    ],
)
def test_a_limit_of_memory_is_a_size_with_a_unit_or_bytes(written: Any, nbytes: int, resolved_as: Any) -> None:
    loaded = load(device_memory_limit=written)
    assert loaded.config.device_memory_limit == nbytes
    assert resolved(loaded)["device_memory_limit"] == resolved_as
    assert load(device_memory_limit=resolved_as) == loaded


@pytest.mark.parametrize("written", ["24G", "24 Gibi", "GiB", "-1GiB", 0, "0GiB", True, 1.5, "1" * 30 + "TiB", [1]])
def test_other_limits_of_memory_are_refused(written: Any) -> None:
    assert "device_memory_limit: must be a size" in message(device_memory_limit=written)


def test_a_limit_of_memory_without_its_unit_is_refused() -> None:
    assert "device_memory_limit: is 24 bytes. Write the unit: 24GiB" in message(device_memory_limit=24)


def test_a_validation_set_leaves_the_training_data_whole() -> None:
    c = config(validation_datasets=[{"path": "v.txt"}], validation_split_ratio=0.2)
    assert c.validation_split_ratio == 0.0
    assert config(validation_datasets=[]).validation_split_ratio == 0.1


def test_planning_needs_no_data_and_training_does() -> None:
    loaded = load(datasets=None)
    with pytest.raises(ConfigError, match=r"run.yaml: datasets: is required"):
        loaded.require_datasets()
    assert load().require_datasets()[0].path == "data.txt"


def test_keys_that_have_no_effect_without_another_key_are_refused() -> None:
    assert "merge_adapter: writes base + adapter, but lora is false" in message(merge_adapter=True)
    assert "init_projections_to_zero: sets new weights, but from_scratch is false" in message(
        init_projections_to_zero=True
    )


def test_settings_of_a_schedule_are_checked_beside_the_rate_and_the_evaluations() -> None:
    wrong = {
        "above learning_rate 0.001": {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.1}},
        "remove final_lr_fraction": {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1e-4},
            "final_lr_fraction": 0.1,
        },
        "did you mean num_cycles": {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 1}},
        "set eval_steps": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 0},
        "validation_split_ratio": {"lr_scheduler_type": "reduce_lr_on_plateau", "validation_split_ratio": 0},
    }
    for says, keys in wrong.items():
        text = message(learning_rate=1e-3, **keys)
        assert says in text and len(text.splitlines()) == 1
    kept = config(lr_scheduler_type="cosine-with-restarts", lr_scheduler_kwargs={"num_cycles": 4})
    assert (kept.lr_scheduler_type, kept.lr_scheduler_kwargs) == ("cosine_with_restarts", {"num_cycles": 4})
