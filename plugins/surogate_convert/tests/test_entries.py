"""Entries of data sets are converted key by key; what has no counterpart is named in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from surogate_convert import command
from surogate_convert.convert import Converted, convert
from surogate_core.api import ConfigError


def converted(tmp_path: Path, config: dict[str, Any]) -> Converted:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = convert(tmp_path / "run.yaml")
    assert all(leaf.fate for leaf in done.leaves)
    return done


def axolotl(tmp_path: Path, entry: dict[str, Any], **keys: Any) -> Converted:
    return converted(tmp_path, {"base_model": "m", "micro_batch_size": 1, "datasets": [entry], **keys})


def test_nested_tables_of_an_entry_are_counted_key_by_key(tmp_path: Path) -> None:
    entry = {
        "path": "someone/agent-data",
        "data_files": ["part-1.jsonl"],
        "type": "chat_template",
        "field_messages": "turns",
        "field_tools": "functions",
        "message_field_training": "train_on_turn",
        "message_property_mappings": {"role": "who", "content": "says", "tool_calls": "calls", "name": "name"},
        "roles": {"user": ["customer"], "assistant": ["agent"], "tool": ["tool"]},
    }
    done = axolotl(
        tmp_path,
        entry,
        chat_template_kwargs={"enable_thinking": False},
        overrides_of_model_config={"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "vocab_size": 8},
        plugins=["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
    )
    assert done.config["datasets"] == [
        {
            "path": "part-1.jsonl",
            "type": "conversation",
            "messages_field": "turns",
            "tools_field": "functions",
            "message_property_mappings": {"role": "who", "content": "says", "tool_calls": "calls"},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert done.config["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0}
    assert len(done.leaves) == 2 + 13 + 5
    assert {key for key, _ in done.missing} == {
        "datasets.0.message_field_training",
        "datasets.0.roles.user",
        "datasets.0.roles.assistant",
        "overrides_of_model_config.vocab_size",
    }
    assert dict(done.missing)["datasets.0.roles.user"].startswith("customer: write user in the rows")
    assert {"datasets.0.roles.tool", "datasets.0.message_property_mappings.name", "plugins"} == {*dict(done.unneeded)}


def test_what_a_chat_template_gets_has_no_place_in_plain_text(tmp_path: Path) -> None:
    done = axolotl(tmp_path, {"path": "p", "type": "completion"}, chat_template_kwargs={"enable_thinking": False})
    assert dict(done.missing)["chat_template_kwargs.enable_thinking"].startswith("no entry of datasets is rendered")
    assert done.config["datasets"] == [{"path": "p", "type": "text"}]


def test_a_key_that_is_read_under_its_own_name_needs_nothing(tmp_path: Path) -> None:
    entry = {"path": "p", "type": "chat_template", "message_field_training": "train", "roles": {"user": ["human"]}}
    assert not axolotl(tmp_path, entry).missing


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"type": "input_output"}, {"type": "weighted"}),
        ({"type": "completion", "field": "body"}, {"type": "text", "text_field": "body"}),
        (
            {"type": {"field_instruction": "q", "field_output": "a", "format": "[INST] {instruction} [/INST]"}},
            {
                "type": "instruction",
                "use_chat_template": False,
                "instruction_field": "q",
                "output_field": "a",
                "prompt_format": "[INST] {instruction} [/INST]",
                "prompt_format_no_input": "[INST] {instruction} [/INST]",
            },
        ),
    ],
)
def test_a_type_of_axolotl_is_one_of_ours(entry: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    done = axolotl(tmp_path, {"path": "p", **entry})
    assert done.config["datasets"] == [{"path": "p", **expected}] and not done.missing
    if entry["type"] == "input_output":
        assert (done.config["loss"], done.config["tokens_weights"]) == ("tokens", True)
        assert "`weight: 1` for `label: true`" in dict(done.differs)["datasets.0.type"]


@pytest.mark.parametrize(
    ("keys", "entry", "expected"),
    [
        ({"rl": "dpo", "rl_beta": 0.2}, {"type": "chat_template.default", "field_chosen": "good"},
         {"type": "preference", "prompt_field": "messages", "chosen_field": "good"}),
        ({"rl": "ipo"}, {"type": "chatml.intel"},
         {"type": "preference", "prompt_field": "question", "system_field": "system"}),
        ({"rl": "orpo", "orpo_alpha": 0.2}, {"type": "chat_template.argilla"},
         {"type": "preference", "prompt_field": "instruction", "chosen_field": "chosen_response",
          "rejected_field": "rejected_response"}),
        ({"rl": "kto"}, {"type": "llama3.ultra"}, {"type": "labelled", "prompt_field": "prompt"}),
        ({"reward_model": True}, {"type": "bradley_terry.chat_template"}, {"type": "preference"}),
    ],
)  # fmt: skip
def test_preferences_of_axolotl_are_converted(
    keys: dict[str, Any], entry: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    done = axolotl(tmp_path, {"path": "p", **entry}, sequence_len=256, adapter="lora", **keys)
    loss = {"ipo": "dpo"}.get(keys.get("rl", ""), keys.get("rl", "reward"))
    cut = {} if loss == "reward" else {"max_tokens": 256}
    assert done.config["loss"] == loss and done.config["sequence_len"] == 512 and not done.missing
    assert done.config["datasets"] == [{"path": "p", **expected, **cut}]
    assert done.config.get("dpo_loss") == ("ipo" if keys.get("rl") == "ipo" else None)


def llamafactory(tmp_path: Path, info: dict[str, Any], **keys: Any) -> Converted:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.json", **info}}))
    return converted(
        tmp_path, {"model_name_or_path": "m", "template": "qwen", "dataset": "mine", "stage": "sft", **keys}
    )


def test_columns_and_tags_of_dataset_info_are_counted(tmp_path: Path) -> None:
    info = {
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "system": "rules", "tools": "functions"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "customer", "observation_tag": "observation"},
    }
    done = llamafactory(tmp_path, info, enable_thinking=False)
    assert done.config["datasets"] == [
        {
            "path": str(tmp_path / "data/rows.json"),
            "type": "conversation",
            "messages_field": "turns",
            "system_field": "rules",
            "tools_field": "functions",
            "message_property_mappings": {"role": "who", "content": "says"},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert len(done.leaves) == 5 + 9
    missing = dict(done.missing)
    assert missing.keys() == {"dataset_info.json.mine.tags.user_tag"}
    assert missing["dataset_info.json.mine.tags.user_tag"].startswith("customer: write user in the rows")


@pytest.mark.parametrize(
    ("stage", "keys", "info", "expected"),
    [
        ("dpo", {"pref_beta": 0.2}, {"ranking": True, "formatting": "sharegpt",
         "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "worse"}},
         {"type": "preference", "prompt_field": "conversations", "rejected_field": "worse"}),
        ("dpo", {"pref_loss": "simpo", "simpo_gamma": 0.7}, {"ranking": True, "columns": {"prompt": "q", "query": "x"}},
         {"type": "preference", "prompt_field": "q", "input_field": "x"}),
        ("kto", {"kto_chosen_weight": 2.0}, {"formatting": "sharegpt", "columns": {"messages": "m", "kto_tag": "good"}},
         {"type": "labelled", "prompt_field": None, "completion_field": "m", "label_field": "good"}),
        ("rm", {}, {"ranking": True, "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}},
         {"type": "preference", "prompt_field": "q", "chosen_field": "a", "rejected_field": "b"}),
    ],
)  # fmt: skip
def test_stages_of_llamafactory_are_losses(
    stage: str, keys: dict[str, Any], info: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    done = llamafactory(tmp_path, info, stage=stage, cutoff_len=100, **keys)
    config = done.config
    assert config["loss"] == {"dpo": keys.get("pref_loss", "dpo"), "kto": "kto", "rm": "reward"}[stage]
    assert config["datasets"][0].items() >= expected.items() and not done.missing
    assert (config.get("dpo_beta"), config.get("simpo_gamma")) == (keys.get("pref_beta"), keys.get("simpo_gamma"))


def test_a_damaged_dataset_info_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{"a": {}, "a": {}}')
    with pytest.raises(ConfigError, match="a key is given twice"):
        converted(tmp_path, {"model_name_or_path": "m", "template": "qwen", "dataset": "a"})


def test_settings_of_the_schedule_and_of_shards_exist_here(tmp_path: Path) -> None:
    done = converted(tmp_path, {"model_name_or_path": "m", "dataset_name": "d", "learning_rate": 1e-4,
                                "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "num_decay_steps": 5}})  # fmt: skip
    assert (done.config["final_lr_fraction"], done.config["cooldown_steps"]) == (0.1, 5) and not done.missing
    own = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}
    done = converted(tmp_path, {"model_name_or_path": "m", "dataset_name": "d", **own})
    assert {key: done.config[key] for key in own} == own and not done.missing
    further: dict[str, Any] = {"use_mlflow": True, "mlflow_experiment_name": "e", "adapter": "lora"}
    further |= {"loraplus_lr_ratio": 8, "lr_scheduler": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}
    done = axolotl(tmp_path, {"path": "p", "type": "alpaca"}, **further)
    expected = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}, "loraplus_lr_ratio": 8}
    expected |= {"report_to": "mlflow", "mlflow_experiment": "e"}
    assert {key: done.config.get(key) for key in expected} == expected
    done = axolotl(tmp_path, {"path": "p", "type": "alpaca"}, warmup_steps=0.1,
                   fsdp_config={"offload_params": True, "reshard_after_forward": True, "fsdp_version": 2})  # fmt: skip
    assert (done.config["warmup_ratio"], done.config["zero_level"]) == (0.1, 3)
    assert {key for key, _ in done.missing} == {"fsdp_config.offload_params"}
    assert "gpus" in dict(done.differs)


def test_defaults_that_differ_are_set_and_listed(tmp_path: Path) -> None:
    done = converted(tmp_path, {"model_name_or_path": "m", "dataset_name": "d"})
    assert {"save_total_limit", "save_steps", "logging_steps"} <= {*done.added}
    assert (done.config["save_total_limit"], done.config["save_steps"]) == (0, 500)
    done = axolotl(tmp_path, {"path": "p", "type": "alpaca"})
    assert (done.config["save_total_limit"], done.config["save_strategy"]) == (4, "epoch")
    assert "eval_strategy" not in done.config, "nothing is held out"
    with_rows = axolotl(tmp_path, {"path": "p", "type": "alpaca"}, val_set_size=0.1)
    assert with_rows.config["eval_strategy"] == "epoch"


def test_a_file_has_no_anchors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries with equal parts: a reader of the file changes one of them and not both."""
    entry = {"path": "rows.jsonl", "type": "chat_template"}
    shared = {"chat_template_kwargs": {"enable_thinking": False}, "test_datasets": [entry]}
    config = {"base_model": "m", "micro_batch_size": 1, "datasets": [entry], **shared}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command.convert(tmp_path / "run.yaml")
    said = capsys.readouterr().out
    assert said.count("enable_thinking: false") == 2 and "&id" not in said
