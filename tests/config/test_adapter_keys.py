"""`adapter`, `lora` and the keys that need an adapter."""

from __future__ import annotations

import pytest
from config.harness import WithAdapter, config, load, message

from surogate.config.adapter import Mode
from surogate.config.load import load_config, resolved
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry
from surogate_lora.options import LoraOptions


@pytest.mark.parametrize("mode", ["train", "pt"])
def test_pretraining_trains_all_weights_by_default(mode: Mode) -> None:
    assert load(mode).config.lora is False


def test_sft_trains_an_adapter_by_default_and_names_the_missing_package() -> None:
    text = message("sft")
    assert text.startswith("run.yaml: lora: no installed plugin") and "surogate-lora" in text and "lora: false" in text
    assert load("sft", lora=False).config.lora is False
    loaded = load("sft", WithAdapter(), lora_rank=8)
    assert loaded.config.lora is True
    assert loaded.adapters == {"lora": LoraOptions(lora_rank=8)}
    assert load_config(resolved(loaded), registry=WithAdapter(), mode="sft", source="again") == loaded


@pytest.mark.parametrize("mode", ["train", "pt", "sft"])
@pytest.mark.parametrize("flag", [True, "true", "Yes"])
def test_a_base_in_a_weight_format_means_lora_whatever_the_verb(mode: Mode, flag: object) -> None:
    registry = load_registry()
    given = load(mode, registry, qlora_bnb=flag)
    assert given.config.lora and given.config.adapter == "lora"
    assert given.config == load("sft", registry, lora=True, qlora_bnb=True).config
    assert load_config(resolved(given), registry=registry, mode=mode, source="again") == given


def test_what_selects_no_weight_format_means_no_adapter() -> None:
    registry = load_registry()
    for flag in (False, "no", None):
        assert not load("train", registry, qlora_bnb=flag).config.lora
    assert load("train", registry, qlora_bnb=True, adapter="dora").config.adapter == "dora"
    for without in ({"lora": False}, {"adapter": "none"}):
        with pytest.raises(ConfigError, match="qlora_bnb: stores frozen weights, but this run trains all of them"):
            load("train", registry, qlora_bnb=True, **without)
    with pytest.raises(ConfigError, match="qlora_bnb: must be true or false"):
        load("train", registry, qlora_bnb="maybe")


def test_keys_of_adapters_need_an_adapter() -> None:
    assert "lora_rank: no installed plugin has this key; pip install surogate-lora" in message(lora_rank=8)
    assert "adapter_path: " in message(adapter_path="out/adapter")
    notices = load(registry=WithAdapter(), lora_rank=8).notices
    assert any("lora_rank: has no effect" in line for line in notices)


def test_an_adapter_needs_a_base_that_can_be_loaded_again() -> None:
    with pytest.raises(ConfigError, match=r"lora: .*from_scratch"):
        load(registry=WithAdapter(), lora=True, from_scratch=True)


def test_adapter_init_mode_matters_only_with_an_adapter_path() -> None:
    lora = {"lora": True, "registry": WithAdapter()}
    assert config(adapter_init_mode="merge", **lora) == config(**lora)
    assert config(adapter_init_mode="trainable", adapter_path="a", **lora).adapter_path == "a"
    assert "adapter_init_mode: not yet" in message(adapter_init_mode="merge", adapter_path="a", **lora)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_modules_to_save", ["embed_tokens"]),
        ("lora_target_parameters", ["mlp.experts.down_proj"]),
        ("lora_rank", 64),
    ],
)
def test_a_key_of_another_adapter_is_refused_unless_it_has_its_default(key: str, value: object) -> None:
    registry = load_registry()
    said = f"{key}: is of adapter lora, and this run trains adapter dora, which does not read it; remove the key, or "
    with pytest.raises(ConfigError, match=f"{said}set adapter: lora"):
        load("sft", registry, adapter="dora", **{key: value})
    default = load("sft", registry, adapter="dora", lora_rank=16, lora_target_modules=["all-linear"], lora_dropout=0)
    assert [line.partition(":")[0] for line in default.notices if "has no effect" in line] == [
        *("lora_rank", "lora_target_modules", "lora_dropout"),
    ]
    with pytest.raises(ConfigError, match="dora_rank: is of adapter dora, and this run trains adapter lora"):
        load("sft", registry, dora_rank=8)
    assert load("train", registry, **{key: value}).config.adapter is None
