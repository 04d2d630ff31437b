"""Keys: unknown, not built, never read, aliases; every key of the original has one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config.harness import FakeRegistry, WithAdapter, load, message
from pydantic import BaseModel

from surogate.config.dataset_entry import DatasetEntry
from surogate.config.keys import ALIASES, DEAD, IGNORED, MEANS, NOT_YET, NOT_YET_NAMES, PACKAGES, foreign, read_table
from surogate.config.schema import TrainConfig
from surogate.config.yaml import read_yaml
from surogate_core.errors import SurogateError


def test_an_unknown_key_names_the_nearest() -> None:
    assert "did you mean gradient_accumulation_steps?" in message(gradient_acumulation_steps=2)
    assert "did you mean learning_rate?" in message(lr=1e-4)
    assert "did you mean sgd_momentum?" in message(sgd_momemtum=0.5)
    assert "did you mean learning_rate?" in message(**{"Learning-Rate": 1})
    assert "datasets.0.samples: must be at least 1 (got 0)" in message(datasets=[{"path": "x", "samples": 0}])
    assert "datasets.0.sampels: unknown key; did you mean samples?" in message(datasets=[{"path": "x", "sampels": 2}])
    assert "unknown key; the config reference lists all keys" in message(**{"x" * 5000: 1})


def test_the_name_of_a_package_that_is_not_installed_is_no_misspelling() -> None:
    registry = FakeRegistry()
    del registry.optimizers["adamw_8bit"]
    assert "optimizer: adamw_8bit — no installed plugin provides it" in message(registry=registry)
    assert "adamv is unknown; did you mean adamw?" in message(registry=registry, optimizer="adamv")


def test_all_problems_are_reported_at_once() -> None:
    lines = message(num_epochs=0, learning_rate="x", nonsense=1, qlora_fp8=True, optimizer="none-such").splitlines()
    assert len(lines) == 5 and all(line.startswith("run.yaml: ") for line in lines)
    assert len(message(**{f"zz{index}": 1 for index in range(500)}).splitlines()) == 500


def test_a_key_that_is_not_built_is_accepted_at_its_default_and_refused_at_other_values() -> None:
    def nested(key: str, value: Any) -> dict[str, Any]:
        section, dot, inner = key.partition(".")
        return {section: {inner: value}} if dot else {key: value}

    for key, entry in NOT_YET.items():
        for value in (*entry.accepted, None):
            assert load(**nested(key, value)) == load(), key
        text = message(**nested(key, "something else"))
        assert text.startswith(f"run.yaml: {key}: not yet: ") and "'something else'" in text and entry.instead in text
    assert load(attn_bwd_chunks="1", persistent_quants="false") == load()


def test_keys_that_name_what_is_always_done_are_accepted() -> None:
    assert load(persistent_quants=True) == load(persistent_quants=False) == load()
    assert load(persistent_quants="yes") == load(persistent_quants="off") == load()
    assert "(accepted: false, true)" in message(persistent_quants="some")


def test_chunks_of_the_attention_backward_must_divide_the_rows() -> None:
    assert load(per_device_train_batch_size=8, attn_bwd_chunks=4).config.attn_bwd_chunks == 4
    text = message(per_device_train_batch_size=8, attn_bwd_chunks=3)
    assert "attn_bwd_chunks: 3 does not divide the 8 rows of a micro-step" in text and "remove the key" in text


def test_names_of_plugins_that_are_not_built_are_refused_with_an_alternative() -> None:
    keys = {"loss": "loss", "logger": "report_to"}
    for (kind, name), instead in NOT_YET_NAMES.items():
        text = message(**{keys[kind]: name})
        assert "not yet" in text and name in text and instead in text


def test_errors_inside_sections_and_datasets_name_the_dotted_key() -> None:
    assert "distillation.kd_weight: not yet" in message(distillation={"kd_weight": 7})
    assert "distillation.kd_dirs: unknown key; did you mean kd_dir?" in message(distillation={"kd_dirs": "x"})
    assert "distillation: must be a section" in message(distillation=3)
    assert "distributed: no installed plugin has this key; pip install surogate-launch-ray" in message(distributed={})
    entry = {"path": "x", "chosen": "good"}
    assert "datasets.0.chosen: unknown key" in message(datasets=[entry])


def test_a_weight_format_that_is_not_installed_is_refused_with_its_package() -> None:
    for key, package in {"qlora_bnb": "nf4", "qlora_fp8": "fp8", "qlora_fp4": "fp4"}.items():
        assert f"{key}: no installed plugin has this key; pip install surogate-qlora-{package}" in message(
            **{key: True}
        )


def test_a_key_that_nothing_reads_is_refused_unless_its_value_changes_nothing() -> None:
    for key, entry in DEAD.items():
        for value in (None, *entry.accepted):
            assert load(**{key: value}) == load() and load(**{key: value}).notices == (), key
        for value in ("something else", 7, {"a": 1}):
            text = message(**{key: value})
            assert text.startswith(f"run.yaml: {key}: nothing reads this key (got ") and entry.instead in text
    assert "system_prompt (type: instruction) or system_field (conversation)" in message(system="Be brief.")
    assert "in the entry of datasets" in message(use_chat_template=False)


def test_an_ignored_key_gives_one_notice() -> None:
    loaded = load(**dict.fromkeys(IGNORED, "x"))
    assert loaded == load()
    assert [notice.partition(":")[0] for notice in loaded.notices] == list(IGNORED)
    assert load(model_type=None).notices == ()


def test_a_flag_of_the_original_selects_the_value_that_it_means() -> None:
    for flag, (key, value) in MEANS.items():
        for true in (True, "yes"):
            loaded = load(**{flag: true, key: "auto"})
            assert loaded == load(**{key: value}) and loaded.notices == (f"{flag}: true means {key}: {value}",)
        assert load(**{flag: False}) == load(**{flag: None}) == load()
        assert f"{flag}: must be true or false (got 7)" in message(**{flag: 7})
        assert f"{flag}: is true, which means transport: copies, but transport is nccl; keep one" in message(
            **{flag: True, "transport": "nccl"}
        )


def test_an_alias_and_its_key_may_not_disagree() -> None:
    assert "given twice" in message(recompute_att=False, recompute_attention=True)
    for alias, key in ALIASES.items():
        assert key in TrainConfig.model_fields or key in NOT_YET, alias


DEFAULTS_REFUSED: dict[str, str] = dict.fromkeys(
    (f"distributed.{key}" for key in ("ray_address", "num_nodes", "gpus_per_node", "worker_output_dir")),
    "pip install surogate-launch-ray",
)
"""Key -> the error for the original's default."""


class WandbOptions(BaseModel):
    wandb_project: str = "Surogate"
    wandb_name: str | None = None


class AdamWAll(BaseModel):
    adamw_beta2: float = 0.999
    adamw_epsilon: float = 1e-8


class NorMuonAll(BaseModel):
    normuon_momentum: float = 0.95
    normuon_beta2: float = 0.95
    normuon_cautious_wd: bool = True


def test_every_key_of_the_original_is_accepted_at_its_default_or_has_a_reason() -> None:
    """`data/original_keys.yaml`: key -> documented default. `DEFAULTS_REFUSED`: the defaults that are not built."""
    registry = WithAdapter(wandb=WandbOptions, adamw_8bit=AdamWAll, normuon=NorMuonAll)
    refused = {}
    for key, value in read_yaml(Path(__file__).parents[1] / "data/original_keys.yaml").items():
        section, dot, inner = key.partition(".")
        try:
            load("sft", registry, **({section: {inner: value}} if dot else {key: value}))
        except SurogateError as error:
            refused[key] = str(error)
    assert {key: text for key, text in refused.items() if key not in DEFAULTS_REFUSED} == {}
    assert refused.keys() == DEFAULTS_REFUSED.keys()
    assert all(DEFAULTS_REFUSED[key] in text for key, text in refused.items())


def test_every_key_is_in_one_table_and_the_tables_refer_to_existing_keys() -> None:
    core = TrainConfig.model_fields.keys()
    for table in (NOT_YET, DEAD, IGNORED, PACKAGES, ALIASES, MEANS):
        assert not core & table.keys()
    same = foreign()["same"]
    assert set(same.values()) <= {*core, *PACKAGES} and not core & same.keys()
    assert set(foreign()["entries"].values()) <= DatasetEntry.model_fields.keys()
    assert {*read_table("original.toml")["differs"]} <= {*core, *NOT_YET}
    assert all(info.description for info in TrainConfig.model_fields.values())


@pytest.mark.parametrize("path", [[{"text": "a"}], {"text": ["a"]}, object()])
def test_data_in_memory_is_answered_with_what_to_do(path: object) -> None:
    text = message(datasets=[{"path": path}])
    assert "datasets.0.path: is data in memory" in text and "to_parquet" in text
