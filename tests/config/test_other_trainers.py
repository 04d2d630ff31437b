"""Keys of other trainers: the error names what to write here."""

from __future__ import annotations

import pytest
from config.harness import message

from surogate.config.keys import ALIASES, DEAD, IGNORED, MEANS, NOT_YET, PACKAGES, foreign
from surogate.config.schema import TrainConfig

FOREIGN = {
    "logging_dir": "output_dir",
    "num_train_epochs": "num_epochs",
    "output_directory": "output_dir",
    "micro_batch_size": "per_device_train_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_device_eval_batch_size": "per_device_train_batch_size",
    "cutoff_len": "sequence_len",
    "gradient_checkpointing": "recompute: true",
    "bf16": "model_dtype: bf16",
    "fp16": "fp16 is not built",
    "optim": "optimizer",
    "flash_attention": "fused",
    "val_set_size": "validation_split_ratio",
    "lora_target_linear": "lora_target_modules: [all-linear]",
    "load_in_4bit": "qlora_bnb: true",
    "load_in_8bit": "qlora_fp8: true",
    "qlora": "set qlora_bnb: true (NF4), qlora_fp8: true or qlora_fp4: true",
    "qlora_nf4": "did you mean qlora_bnb?",
    "bnb_4bit_use_double_quant": "qlora_bnb_double_quant",
    "train_on_inputs": "loss_scale: all",
    "enable_activation_checkpointing": "recompute: auto",
    "evaluation_strategy": "eval_strategy",
    "deepspeed": "zero_level: 1, 2 or 3",
    "early_stopping": "early_stopping_patience",
    "early_stopping_steps": "early_stopping_patience",
    "label_smoothing_factor": "tokens_label_smoothing",
    "beta": "dpo_beta, kto_beta, orpo_beta or simpo_beta",
    "assistant_only_loss": "loss_scale",
    "max_prompt_length": "max_prompt_tokens in an entry",
    "r": "lora_rank",
}
"""Names of Trainer, axolotl, Unsloth, LLaMA-Factory and torchtune -> text that the error must contain."""


@pytest.mark.parametrize("name", FOREIGN)
def test_a_key_of_another_trainer_is_refused_with_the_key_to_use_here(name: str) -> None:
    text = message(**{name: 1})
    assert text.startswith(f"run.yaml: {name}: unknown key; ") and FOREIGN[name] in text


def test_an_unknown_key_that_is_near_none_names_the_command_that_reads_other_configs() -> None:
    assert "the config reference lists all keys, and `surogate convert` reads" in message(freeze_vision_tower=1)


def test_no_hint_is_for_a_key_that_is_read() -> None:
    ours = {*TrainConfig.model_fields, *NOT_YET, *DEAD, *IGNORED, *MEANS, *ALIASES, *PACKAGES}
    hints, same = foreign()["hints"].keys(), foreign()["same"].keys()
    assert not ours & hints and not ours & same and not hints & same
    assert all(name == name.lower() and "-" not in name for name in (*hints, *same))
