"""Of two keys for one of ours a rule decides, never their order."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import yaml

from surogate_convert.convert import convert
from surogate_core.api import ConfigError

LLAMAFACTORY = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ntemplate: qwen\n"
TRL = "model_name_or_path: m\ndataset_name: d\n"
AXOLOTL = "base_model: m\nmicro_batch_size: 1\n"


def in_every_order(tmp_path: Path, base: str, *lines: str) -> dict[str, object]:
    """Return the config, which is the same in every order of the lines."""
    configs = []
    for order in permutations(lines):
        (tmp_path / "run.yaml").write_text(base + "\n".join(order))
        configs.append(convert(tmp_path / "run.yaml").config)
    assert all(config == configs[0] for config in configs)
    return configs[0]


@pytest.mark.parametrize(
    ("base", "lines", "key", "value"),
    [
        (LLAMAFACTORY, ["mask_history: true", "train_on_prompt: false"], "loss_scale", "last_round"),
        (LLAMAFACTORY, ["mask_history: false", "train_on_prompt: true"], "loss_scale", "all"),
        (LLAMAFACTORY, ["packing: false", "neat_packing: true"], "sample_packing", True),
        (LLAMAFACTORY, ["use_muon: true", "optim: adamw_torch"], "optimizer", "normuon"),
        (LLAMAFACTORY, ["bf16: true", "pure_bf16: true"], "model_dtype", "bf16"),
        (TRL, ["completion_only_loss: true", "assistant_only_loss: false"], "loss_scale", "default"),
        (TRL, ["completion_only_loss: false", "assistant_only_loss: true"], "loss_scale", "default"),
        (TRL, ["dtype: float32", "bf16: true"], "model_dtype", "bf16"),
        (TRL, ["warmup_steps: 0.2", "warmup_ratio: 0.03"], "warmup_ratio", 0.2),
        (TRL, ["warmup_steps: 0", "warmup_ratio: 0.03"], "warmup_ratio", 0.03),
        (TRL, ["eval_strategy: 'no'", "eval_steps: 100"], "eval_strategy", "no"),
        (TRL, ["eval_strategy: steps", "eval_steps: 0.1"], "eval_steps", 0.1),
        (AXOLOTL, ["evals_per_epoch: 2", "saves_per_epoch: 1"], "saves_per_epoch", 1),
        (AXOLOTL, ["lora_target_linear: true", "lora_target_modules: [q_proj]", "adapter: lora"], "lora_target_modules",
         ["all-linear"]),
        (AXOLOTL, ["fsdp: [full_shard]", "fsdp_config: {reshard_after_forward: false}"], "zero_level", 2),
    ],
)  # fmt: skip
def test_a_default_and_what_a_tool_overrules_yield(
    base: str, lines: list[str], key: str, value: object, tmp_path: Path
) -> None:
    assert in_every_order(tmp_path, base, *lines)[key] == value


@pytest.mark.parametrize(
    ("base", "lines"),
    [
        (LLAMAFACTORY, ["mask_history: true", "train_on_prompt: true"]),
        (TRL, ["lora_r: 8", "r: 16", "use_peft: true"]),
        (
            AXOLOTL,
            ["overrides_of_model_config: {rope_scaling: {rope_type: yarn}}", "rope_scaling: {rope_type: linear}"],
        ),
    ],
)
def test_two_that_were_chosen_are_refused_with_both(base: str, lines: list[str], tmp_path: Path) -> None:
    for order in permutations(lines):
        (tmp_path / "run.yaml").write_text(base + "\n".join(order))
        with pytest.raises(ConfigError, match=r"asks for .*asks for .*Keep one of them"):
            convert(tmp_path / "run.yaml")


def test_one_that_is_overruled_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(TRL + "warmup_ratio: 0.03\nwarmup_steps: 0.2\n")
    assert ("warmup_ratio", "warmup_ratio is 0.2 by warmup_steps, which decides") in convert(
        tmp_path / "run.yaml"
    ).differs


def test_a_section_does_not_hide_a_key_of_another(tmp_path: Path) -> None:
    config = {"model": "m", "training": {"lora_r": 8, "training_type": "lora"}, "lora": {"lora_r": 16}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="lora_r: 16 asks for 16; lora_r: 8 asks for 8"):
        convert(tmp_path / "run.yaml", "unsloth")
