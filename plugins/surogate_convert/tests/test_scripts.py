"""Every argument of every call of a library is converted or named, and so is what else a script does to its objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_convert.convert import Converted, convert
from surogate_core.api import ConfigError

LOAD = 'from datasets import load_dataset\ntrain = load_dataset("json", data_files="rows.jsonl", split="train")\n'


def converted(tmp_path: Path, text: str) -> Converted:
    (tmp_path / "train.py").write_text(text)
    done = convert(tmp_path / "train.py")
    assert all(leaf.fate for leaf in done.leaves)
    assert done.converted + len(done.missing) + len(done.unneeded) == len(done.leaves)
    return done


@pytest.mark.parametrize(
    ("trainer", "loss", "arguments", "expected"),
    [
        ("DPO", "dpo", "beta=0.3, loss_type='ipo', label_smoothing=0.1, precompute_ref_log_probs=True",
         {"dpo_beta": 0.3, "dpo_loss": "ipo", "dpo_label_smoothing": 0.1, "reference": "cached"}),
        ("KTO", "kto", "beta=0.2, desirable_weight=1.5, undesirable_weight=0.5",
         {"kto_beta": 0.2, "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.5, "reference": "frozen"}),
        ("ORPO", "orpo", "beta=0.2, max_prompt_length=100", {"orpo_beta": 0.2}),
        ("CPO", "simpo", "loss_type='simpo', beta=2.5, simpo_gamma=1.2, cpo_alpha=0.0",
         {"simpo_beta": 2.5, "simpo_gamma": 1.2}),
        ("Reward", "reward", "center_rewards_coefficient=0.01", {"reward_center": 0.01}),
    ],
)  # fmt: skip
def test_trainers_of_preferences_are_converted_with_all_their_arguments(
    trainer: str, loss: str, arguments: str, expected: dict[str, object], tmp_path: Path
) -> None:
    text = f"from trl import {trainer}Config, {trainer}Trainer\n{LOAD}"
    text += f'args = {trainer}Config(output_dir="out", learning_rate=5e-7, per_device_train_batch_size=2, '
    text += f"max_length=1024, num_train_epochs=1, {arguments})\n"
    text += f'trainer = {trainer}Trainer("m/base", args=args, train_dataset=train)\ntrainer.train()\n'
    done = converted(tmp_path, text)
    config = done.config
    assert (config["loss"], config["learning_rate"], config["output_dir"]) == (loss, 5e-7, "out")
    assert (config["model"], config["per_device_train_batch_size"], config["num_epochs"]) == ("m/base", 2, 1)
    assert expected.items() <= config.items() and not done.missing
    entry = config["datasets"][0]
    assert entry["path"] == "rows.jsonl" and entry["type"] == ("labelled" if loss == "kto" else "preference")
    assert config["sequence_len"] == 2048 and entry.get("max_tokens") == (None if loss == "reward" else 1024)
    assert entry.get("max_prompt_tokens") == (100 if "max_prompt" in arguments else None)
    assert "loss_scale" not in config and config["sample_packing"] == (loss == "kto")


@pytest.mark.parametrize("name", ["GRPO", "PPO", "RLOO", "OnlineDPO", "GKD", "BCO", "PRM", "Seq2Seq"])
def test_a_trainer_that_is_not_here_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    text = f"from trl import {name}Config, {name}Trainer\nt = {name}Trainer(model='m', args={name}Config('o'))\n"
    with pytest.raises(ConfigError, match=f"trainer: {name}Trainer is not converted. Fine-tuning, DPO, KTO"):
        converted(tmp_path, text)
    with pytest.raises(ConfigError, match="CPO is not converted"):
        converted(tmp_path, "from trl import CPOTrainer\nCPOTrainer(model='m')\n")
    with pytest.raises(ConfigError, match="loss_type: robust is a loss that is not built"):
        converted(
            tmp_path, "from trl import DPOConfig, DPOTrainer\nDPOTrainer('m', args=DPOConfig(loss_type='robust'))\n"
        )
    with pytest.raises(ConfigError, match="AutoModelForVision2Seq is not a text model"):
        converted(tmp_path, "from transformers import AutoModelForVision2Seq as A\nfrom trl import SFTTrainer\n"
                            "SFTTrainer(model=A.from_pretrained('m'))\n")  # fmt: skip


def test_a_script_that_trains_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    text = "from trl import DPOTrainer, SFTTrainer\nSFTTrainer(model='m')\nDPOTrainer(model='m')\n"
    with pytest.raises(ConfigError, match="trains 2 times: SFTTrainer in line 2, DPOTrainer in line 3"):
        converted(tmp_path, text)


def test_every_argument_of_a_trainer_is_accounted_for(tmp_path: Path) -> None:
    text = (
        LOAD
        + """from trl import SFTConfig, SFTTrainer
lr = 1e-4
trainer = SFTTrainer(
    model="Qwen/Qwen3-0.6B",
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
    args=SFTConfig(output_dir="x", learning_rate=lr, num_train_epochs=2, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", group_by_length=True, lr_scheduler_kwargs={"min_lr": 1e-6},
        logging_first_step=True, eval_on_start=True, eval_delay=2,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        dataloader_persistent_workers=True, average_tokens_across_devices=True, made_up=3, **EXTRA),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)], compute_metrics=measure,
)
trainer.train(resume_from_checkpoint=True)
trainer.save_model("final")
"""
    )
    done = converted(tmp_path, text)
    assert done.config["model"] == "Qwen/Qwen3-0.6B" and done.config["datasets"] == [{"path": "trl-lib/Capybara"}]
    assert (done.config["learning_rate"], done.config["final_lr_fraction"]) == (1e-4, 0.01)
    assert done.config["resume_from_checkpoint"] is True
    missing = dict(done.missing)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_on_start": True, "eval_delay": 2}
    assert best.items() <= done.config.items() and done.config["early_stopping_patience"] == 3
    assert {"made_up", "**EXTRA"} <= {*missing} and "callbacks" not in missing
    assert "losses alone" in missing["compute_metrics"]
    assert missing["made_up"] == "3: is unknown to surogate convert"
    assert {"load_dataset.0.path", "load_dataset.0.data_files"} <= {*missing}, "rows that no trainer is given"
    assert "after_training.save_model.output_dir" in dict(done.unneeded) or "after_training.save_model.0" in dict(
        done.unneeded
    )


@pytest.mark.parametrize(
    ("callback", "patience", "threshold"),
    [("EarlyStoppingCallback()", 1, None), ("EarlyStoppingCallback(2, 0.01)", 2, 0.01)],
)
@pytest.mark.parametrize("added", [False, True])
def test_the_callback_that_stops_early_is_two_keys(
    callback: str, patience: int, threshold: float | None, added: bool, tmp_path: Path
) -> None:
    given = "" if added else f", callbacks=[{callback}]"
    text = f"""from trl import SFTConfig, SFTTrainer
from transformers import EarlyStoppingCallback
trainer = SFTTrainer(model="m", train_dataset="rows.jsonl", args=SFTConfig(output_dir="out"){given})
{f"trainer.add_callback({callback})" if added else ""}
trainer.train()
"""
    done = converted(tmp_path, text)
    found = done.config["early_stopping_patience"], done.config.get("early_stopping_threshold")
    assert found == (patience, threshold)
    assert not {"callbacks", "add_callback"} & {key.split(".")[0] for key, _ in done.missing}


def test_a_callback_of_the_script_is_named(tmp_path: Path) -> None:
    text = "from trl import SFTTrainer\ntrainer = SFTTrainer(model='m', callbacks=[Mine(3)])\ntrainer.train()\n"
    assert "can stop a run early" in dict(converted(tmp_path, text).missing)["callbacks"]


UNSLOTH = """from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained(model_name="./base", max_seq_length=512, load_in_4bit=False)
tokenizer.add_special_tokens({"additional_special_tokens": ["<mood>"]})
tokenizer.pad_token = tokenizer.eos_token
model.resize_token_embeddings(len(tokenizer))
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8, bias="lora_only",
                                         target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"])
for name, parameter in model.named_parameters():
    parameter.requires_grad = False
trainer = SFTTrainer(model=model, train_dataset="rows.jsonl", args=SFTConfig(output_dir="out", max_steps=10))
trainer.train()
model.save_pretrained_merged("final", tokenizer, save_method="merged_16bit")
model.save_pretrained_gguf("final-gguf", tokenizer, quantization_method="q4_k_m")
model.push_to_hub("me/adapter", private=True)
"""


def test_what_a_script_does_to_its_objects_is_accounted_for(tmp_path: Path) -> None:
    done = converted(tmp_path, UNSLOTH)
    config, missing = done.config, dict(done.missing)
    assert config["lora_target_modules"] == ["q_proj", "v_proj"]
    assert config["lora_modules_to_save"] == ["embed_tokens", "lm_head"]
    assert (
        "target_modules",
        "embed_tokens, lm_head: trained in full with the adapter (lora_modules_to_save)",
    ) in done.differs
    assert config["merge_adapter"] and config["push_to_hub"] and config["hub_private"]
    assert (config["hub_model_id"], config["datasets"]) == ("me/adapter", [{"path": "rows.jsonl"}])
    assert missing["bias"] == "lora_only: biases of the base stay frozen: none is trained"
    assert "which parameters are frozen" in missing["requires_grad"]
    assert "add tokens to the model's folder" in missing["add_special_tokens.0.additional_special_tokens"]
    assert missing["resize_token_embeddings.0"].startswith("line 6: len(tokenizer)")
    assert missing["save_pretrained_gguf.quantization_method"].startswith(
        "q4_k_m: a run writes no GGUF file: surogate export OUTPUT FOLDER --format gguf"
    )
    assert "pad_token" in dict(done.unneeded)


def test_rows_are_those_that_the_trainer_is_given(tmp_path: Path) -> None:
    text = """from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
raw = load_dataset("a/b", "subset")
rows = raw["train_sft"].shuffle(seed=1)
rows = rows.select(range(2 * 50))
SFTTrainer(model="m", args=SFTConfig("o"), train_dataset=rows, eval_dataset=raw["test_sft"])
"""
    config = converted(tmp_path, text).config
    assert config["datasets"] == [{"path": "a/b", "subset": "subset", "split": "train_sft", "samples": 100}]
    assert config["validation_datasets"] == [{"path": "a/b", "subset": "subset", "split": "test_sft"}]
    text = text.replace('raw["test_sft"]', "parts['test']").replace("=rows,", "=parts['train'],")
    text = text.replace("SFTTrainer(", "parts = raw['train'].train_test_split(test_size=0.2, seed=3)\nSFTTrainer(")
    done = converted(tmp_path, text)
    assert done.config["validation_split_ratio"] == 0.2 and "validation_datasets" not in done.config
    assert done.config["datasets"] == [{"path": "a/b", "subset": "subset"}] and not done.missing


def test_rows_that_code_makes_are_named(tmp_path: Path) -> None:
    text = LOAD + "from trl import SFTConfig, SFTTrainer\nrows = train.map(lambda row: row, num_proc=2).filter(good)\n"
    text += "args = SFTConfig('o', dataset_text_field='text')\n"
    text += "SFTTrainer(model='m', args=args, train_dataset=rows, eval_dataset=other)\n"
    done = converted(tmp_path, text)
    assert done.config["datasets"] == [{"path": "rows.jsonl"}]  # what the script makes of them is not known
    assert {"map.function", "map.num_proc", "filter.function", "eval_dataset"} <= {*dict(done.missing)}


def test_a_tokenizer_and_a_reference_of_their_own_are_named(tmp_path: Path) -> None:
    text = (
        LOAD
        + """import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("m/base", torch_dtype=torch.bfloat16)
reference = AutoModelForCausalLM.from_pretrained("m/other")
tokenizer = AutoTokenizer.from_pretrained("m/chat", use_fast=True)
cfg = DPOConfig("out")
cfg.learning_rate = 3e-6
DPOTrainer(model, reference, cfg, train_dataset=train, processing_class=tokenizer, peft_config=LoraConfig(r=4)).train()
"""
    )
    done = converted(tmp_path, text)
    assert (done.config["model"], done.config["learning_rate"]) == ("m/base", 3e-6)
    assert (done.config["model_dtype"], done.config["lora"], done.config["lora_rank"]) == ("bf16", True, 4)
    assert (done.config["lora_alpha"], done.config["lora_dropout"]) == (8, 0.0), "PEFT's own defaults"
    missing = dict(done.missing)
    assert "set reference_model" in missing["ref_model.model_name"]
    assert "another tokenizer" in missing["tokenizer_name_or_path"]
    same = text.replace("m/chat", "m/base")
    assert "tokenizer_name_or_path" in dict(converted(tmp_path, same).unneeded)


def test_two_calls_that_disagree_are_refused_with_their_lines(tmp_path: Path) -> None:
    text = "from trl import SFTConfig, SFTTrainer\nargs = SFTConfig('o', seed=1)\nargs.seed = 2\n"
    text += "SFTTrainer('m', args=args)\n"
    with pytest.raises(ConfigError, match=r"seed: 1 \(line 2\) asks for 1; seed: 2 \(line 3\) asks for 2"):
        converted(tmp_path, text)


@pytest.mark.parametrize("text", ["x = 1\n", "import os\nos.environ['A'] = 'b'\n", "def f(:\n", "a = [" * 300])
def test_a_script_that_trains_nothing_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"calls none of|is not Python"):
        converted(tmp_path, text)
