"""Suggestions: only for misspellings, and by meaning for what other trainers write."""

from __future__ import annotations

import pytest
from config.harness import WithAdapter, message

MISLEADING = {
    "max_samples": "samples in the entry",
    "dataset_prepared_path": "XDG_CACHE_HOME",
    "eval_sample_packing": "sample_packing for both",
    "lora_bias": "biases",
    "galore_rank": "GaLore is not built",
    "num_proc": "did you mean dataloader_num_workers?",
    "log_level": "remove the key",
    "train_type": "lora: true",
    "embedding_lr": "one learning_rate",
}
"""Key of another trainer, which the spelling alone took for one that means something else -> what it is told."""

NAMES = {
    ("recipe", "fp8"): "set recipe: fp8-hybrid",
    ("recipe", "fp4"): "set recipe: nvfp4",
    ("adapter", "qlora"): "qlora_bnb: true",
    ("optimizer", "adamw_torch"): "set optimizer: adamw",
    ("optimizer", "adamw_bnb_8bit"): "set optimizer: adamw_8bit",
    ("optimizer", "paged_adamw_8bit"): "set optimizer: adamw_8bit, and offload_optimizer: true",
}


@pytest.mark.parametrize("key", MISLEADING)
def test_a_key_that_only_looks_like_ours_is_explained_by_its_meaning(key: str) -> None:
    text = message(registry=WithAdapter(), **{key: 1})
    assert MISLEADING[key] in text and text.count("did you mean") == MISLEADING[key].count("did you mean")


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_name_of_another_trainer_names_its_counterpart(kind: str, name: str) -> None:
    assert f"run.yaml: {kind}: {name} is unknown; " in message(registry=WithAdapter(), **{kind: name})
    assert NAMES[kind, name] in message(registry=WithAdapter(), **{kind: name.upper().replace("_", "-")})


def test_the_types_of_axolotl_name_their_counterparts_and_the_entry() -> None:
    text = message(datasets=[{"path": "x"}, {"path": "y", "type": "completion"}])
    assert text == "run.yaml: datasets.1.type: completion is unknown; set type: text"


def test_a_type_that_nothing_provides_is_an_error_of_its_entry() -> None:
    text = message(datasets=[{"path": "x", "type": "haystack"}])
    assert text.startswith("run.yaml: datasets.0.type: haystack — no installed plugin provides it")


@pytest.mark.parametrize("key", ["learning_rat", "learnign_rate", "elarning_rates", "learning__rate", "gpsu"])
def test_one_edit_is_a_misspelling_and_from_eight_letters_on_two(key: str) -> None:
    assert f"did you mean {'gpus' if key == 'gpsu' else 'learning_rate'}?" in message(**{key: 1})


@pytest.mark.parametrize("key", ["gups_x", "learn_rates", "zero_lvl_x", "x", ""])
def test_what_is_farther_away_gets_no_suggestion(key: str) -> None:
    assert "did you mean" not in message(**{key: 1})


def test_a_section_names_its_keys_where_none_is_close() -> None:
    assert "datasets.0.colour: unknown key; the keys here are" in message(datasets=[{"path": "x", "colour": 2}])
    assert "did you mean samples?" in message(datasets=[{"path": "x", "max_samples": 2}])
