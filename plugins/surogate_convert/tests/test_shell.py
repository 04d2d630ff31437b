"""The training command of a shell script is read with its launcher, its environment and its variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_convert.convert import Converted, convert
from surogate_core.api import ConfigError


def converted(tmp_path: Path, text: str) -> Converted:
    (tmp_path / "run.sh").write_text(text)
    done = convert(tmp_path / "run.sh")
    assert all(leaf.fate for leaf in done.leaves)
    return done


FACTORY = "llamafactory-cli train --stage sft --finetuning_type full --dataset chats --template qwen"


def test_variables_of_the_script_are_known(tmp_path: Path) -> None:
    text = "BASE=/models/tiny\nexport OUT=${ROOT:-runs}/a\n"
    text += f'{FACTORY} --model_name_or_path ${{BASE}} --output_dir "$OUT"\n'
    config = converted(tmp_path, text).config
    assert (config["model"], config["output_dir"]) == ("/models/tiny", "runs/a")
    text = f'EXTRA="--bf16 true --seed 3"\n{FACTORY} --model_name_or_path m $EXTRA\n'
    assert converted(tmp_path, text).config["train_seed"] == 3


@pytest.mark.parametrize("value", ["$1", "$UNSET", "$(date)", "`date`", "$TWICE"])
def test_a_value_that_the_shell_computes_is_named(value: str, tmp_path: Path) -> None:
    text = f"TWICE=a\nTWICE=b\n{FACTORY} --model_name_or_path m --output_dir {value} --seed 7\n"
    done = converted(tmp_path, text)
    assert dict(done.missing)["output_dir"] == "is computed by the shell; set output_dir"
    assert "output_dir" not in done.config and done.config["train_seed"] == 7


def test_a_launcher_and_an_environment_are_accounted_for(tmp_path: Path) -> None:
    text = """#!/bin/bash
set -e
pip install trl  # not a training command
CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file configs/deepspeed_zero3.yaml --num_processes 2 \\
    --main_process_port 29501 --num_machines 1 trl/scripts/dpo.py \\
    --model_name_or_path m --dataset_name d --loss_type ipo --beta 0.2 --use_peft --lora_target_modules q_proj v_proj \\
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' --no_remove_unused_columns 2>&1 | tee log.txt
llamafactory-cli export merge.yaml
"""
    done = converted(tmp_path, text)
    config, missing, unneeded = done.config, dict(done.missing), dict(done.unneeded)
    assert (config["loss"], config["dpo_loss"], config["dpo_beta"]) == ("dpo", "ipo", 0.2)
    assert (config["zero_level"], config["gpus"], config["lora_target_modules"]) == (3, 2, ["q_proj", "v_proj"])
    assert any(key == "launcher.config_file" and "are not read" in said for key, said in done.differs)
    assert {"launcher.num_machines", "commands.llamafactory-cli"} == {*missing}
    assert {"environment.CUDA_VISIBLE_DEVICES", "launcher.main_process_port"} <= {*unneeded}
    assert "gradient_checkpointing_kwargs.use_reentrant" in unneeded


def test_a_config_of_a_launcher_without_a_stage_is_named(tmp_path: Path) -> None:
    text = "accelerate launch --config_file x.yaml sft.py --model_name_or_path m --dataset_name d\n"
    assert "its keys are not read" in dict(converted(tmp_path, text).missing)["launcher.config_file"]
    text = "trl sft --config sft.yaml --learning_rate 1e-5 --model_name_or_path m\n"
    done = converted(tmp_path, text)
    assert dict(done.missing)["config"].startswith("sft.yaml: its keys are not read: convert this file")
    done = converted(
        tmp_path, f"{FACTORY.replace('train', 'train full.yaml learning_rate=1e-5')} --model_name_or_path m"
    )
    assert "convert this file" in dict(done.missing)["config"]
    assert done.config["learning_rate"] == 1e-5


def test_zero_without_gpus_is_hinted_at(tmp_path: Path) -> None:
    done = converted(tmp_path, f"{FACTORY} --model_name_or_path m --deepspeed ds_z3_config.json\n")
    assert dict(done.differs)["gpus"].startswith("one, so zero_level: 3 has nothing to divide among, and a step trains")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trl sft --model_name_or_path m\ntrl dpo --model_name_or_path n\n", "trains 2 times: trl sft .*; trl dpo"),
        ("trl grpo --model_name_or_path m\n", "command: grpo of TRL is not converted"),
        ("cat > x <<EOF\na\nEOF\n", "has a text in place"),
        ("echo done\n", "has no options"),
        ("trl sft --a 'b\n", "is not a command line"),
    ],
)
def test_what_is_no_single_training_command_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(tmp_path, text)
