"""Claims of the configuration: what a user may write, what it means, and what an error says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import DatasetFormatDef, Encoded, NoOptions
from surogate_core.config.foreign import ELSEWHERE, HINTS
from surogate_core.config.keys import ALIASES, DEAD, DIFFERS, IGNORED, LIMITS, NOT_YET, NOT_YET_NAMES, PACKAGES
from surogate_core.config.load import (
    LoadedConfig,
    Mode,
    TrainConfig,
    apply_overrides,
    dump_yaml,
    load_config,
    read_yaml,
    resolved,
)
from surogate_core.errors import ConfigError, PluginError, SurogateError
from surogate_lora.options import LoraOptions


class SgdOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    sgd_momentum: float = Field(0.9, ge=0, lt=1)
    sgd_steps: int = 5
    sgd_nesterov: bool = False


class AdamWOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    adamw_beta1: float = 0.9


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    text_field: str = "text"
    sample_by: Literal["document", "paragraph", "line"] = "document"


TEXT = DatasetFormatDef(
    name="text",
    summary="Plain text.",
    options=TextOptions,
    matches=lambda columns: "text" in columns,
    fields=lambda options: (options.text_field,),
    encode=lambda row, tokenizer, options: Encoded((), ()),
)


class FakeRegistry:
    """Two optimizers, a recipe, a logger and the text format; no discovery."""

    def __init__(self, **options: type[BaseModel]) -> None:
        self.optimizers: dict[str, type[BaseModel]] = {"adamw": AdamWOptions, "sgd": SgdOptions, **options}

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        optimizers = {("optimizer", name): model for name, model in self.optimizers.items()}
        return {("recipe", "bf16"): NoOptions, **optimizers}

    def dataset_formats(self) -> Mapping[str, DatasetFormatDef]:
        return {"text": TEXT}

    def names(self, kind: str) -> list[str]:
        return {
            "recipe": ["bf16"],
            "optimizer": list(self.optimizers),
            "logger": ["console", "my-board"],
            "format": ["text"],
            "adapter": [],
            "launcher": ["local"],
            "offload": [],
        }[kind]

    def failed(self, kind: str, name: str, function: str, cause: BaseException) -> PluginError | None:
        return PluginError(f"{kind} {name} failed in {function}: {cause!r}", distribution="d")

    def missing(self, kind: str, name: str) -> PluginError:
        return PluginError(f"{kind}: {name} — no installed plugin provides it", distribution="d")


class WithAdapter(FakeRegistry):
    """The same with LoRA installed."""

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        return {**super().options_models(), ("adapter", "lora"): LoraOptions}

    def names(self, kind: str) -> list[str]:
        return ["lora"] if kind == "adapter" else super().names(kind)


MINIMAL: dict[str, Any] = {"model": "Qwen/Qwen3-0.6B", "datasets": [{"path": "data.txt"}]}


def load(mode: Mode = "train", registry: FakeRegistry | None = None, **keys: Any) -> LoadedConfig:
    return load_config({**MINIMAL, **keys}, registry=registry or FakeRegistry(), mode=mode, source="run.yaml")


def config(**keys: Any) -> TrainConfig:
    return load(**keys).config


def message(mode: Mode = "train", **keys: Any) -> str:
    with pytest.raises(SurogateError) as caught:
        load(mode, **keys)
    assert caught.value.exit_code == 2
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- defaults


def test_defaults_are_the_decided_ones() -> None:
    c = config()
    assert (c.optimizer, c.recipe, c.sequence_len, c.lmhead_chunks, c.lora) == ("adamw", "bf16", 1024, "auto", False)
    assert (c.learning_rate, c.weight_decay, c.max_grad_norm, c.lr_scheduler_type) == (2e-4, 0.1, 1.0, "linear")
    assert (c.per_device_train_batch_size, c.gradient_accumulation_steps, c.num_epochs) == (2, 4, 3)
    assert (c.save_steps, c.save_total_limit, c.eval_steps, c.logging_steps) == (50, 5, 100, 1)
    assert (c.train_seed, c.eval_seed, c.validation_split_ratio, c.max_nonfinite_steps) == (1234, 1234, 0.1, 10)
    assert (c.datasets[0].type, c.datasets[0].split, c.recompute) == ("auto", "train", frozenset())


def test_folders_and_names_follow_the_output_folder_unless_set() -> None:
    c = config(output_dir="out/first")
    assert (c.resolved_run_name, c.resolved_checkpoint_dir) == ("first", "out/first")
    c = config(output_dir="out/first", run_name="r", checkpoint_dir="c")
    assert (c.resolved_run_name, c.resolved_checkpoint_dir) == ("r", "c")


@pytest.mark.parametrize("mode", ["train", "pt"])
def test_pretraining_trains_all_weights_by_default(mode: Mode) -> None:
    assert load(mode).config.lora is False


def test_sft_trains_an_adapter_by_default_and_says_how_to_do_without_its_package() -> None:
    text = message("sft")
    assert text.startswith("run.yaml: lora: no installed plugin") and "surogate-lora" in text and "lora: false" in text
    assert load("sft", lora=False).config.lora is False
    loaded = load("sft", WithAdapter(), lora_rank=8)
    assert loaded.config.lora is True
    assert loaded.adapters == {"lora": LoraOptions(lora_rank=8)}
    assert load_config(resolved(loaded), registry=WithAdapter(), mode="sft", source="again") == loaded


def test_keys_of_adapters_need_an_adapter() -> None:
    assert "lora_rank: no installed plugin has this key; pip install surogate-lora" in message(lora_rank=8)
    assert "adapter_path: " in message(adapter_path="out/adapter")
    told = load(registry=WithAdapter(), lora_rank=8).notices
    assert any("lora_rank: has no effect" in line for line in told)


def test_an_adapter_needs_a_base_that_can_be_loaded_again() -> None:
    with pytest.raises(ConfigError, match=r"lora: .*from_scratch"):
        load(registry=WithAdapter(), lora=True, from_scratch=True)


def test_explicit_null_means_the_default() -> None:
    assert load(**dict.fromkeys(TrainConfig.model_fields.keys() - {"model", "datasets"})) == load()


# ------------------------------------------------------------------------------------------------------------ values


def test_numbers_and_bools_may_be_text() -> None:
    c = config(learning_rate="2e-4", num_epochs="2", max_steps="1e3", save_steps=5.0, from_scratch="True")
    assert (c.learning_rate, c.num_epochs, c.max_steps, c.save_steps, c.from_scratch) == (2e-4, 2, 1000, 5, True)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_epochs", True, "whole number"),
        ("num_epochs", 1.5, "whole number"),
        ("num_epochs", 0, "at least 1"),
        ("num_epochs", 10**30, "at most"),
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
        ("lr_scheduler_type", "polynomial", "'linear', 'cosine', 'wsd' or 'constant'"),
        ("model", "", "empty"),
        ("model", 1.5, "quotes"),
        ("output_dir", "a\0b", "control"),
        ("lmhead_chunks", "many", "auto or a whole number"),
        ("lmhead_chunks", 0, "at least 1"),
        ("lmhead_chunks", 3, "does not divide"),
        ("datasets", "data.txt", "list of entries"),
        ("datasets", ["data.txt"], "mapping with a path"),
        ("datasets", [{"type": "text"}], "datasets.0.path: is required"),
        ("model_dtype", "fp16", "'fp32' or 'bf16'"),
        ("matmul_dtype", "e2m1", "'fp32', 'bf16' or 'e4m3'"),
        ("gradient_dtype", "fp16", "'fp32', 'bf16' or 'e5m2'"),
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


def test_names_fold_case_and_hyphens() -> None:
    c = config(
        recipe="BF16", optimizer="AdamW", lr_scheduler_type="WSD", report_to="My_Board", kernels="allow-reference"
    )
    assert (c.recipe, c.optimizer, c.lr_scheduler_type, c.report_to) == ("bf16", "adamw", "wsd", ("my-board",))
    assert c.kernels == "allow_reference"
    assert config(datasets=[{"path": "x", "type": "TEXT"}]).datasets[0].type == "text"


class WithBoard(FakeRegistry):
    """The same with a logger that has an option."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        board_project: str = "Surogate"

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        return {**super().options_models(), ("logger", "my-board"): self.Options}


def test_a_logger_has_its_keys_when_it_is_reported_to() -> None:
    loaded = load(registry=WithBoard(), report_to="my_board", board_project="p")
    assert loaded.options["logger", "my-board"] == WithBoard.Options(board_project="p")
    assert resolved(loaded)["board_project"] == "p"
    assert load_config(resolved(loaded), registry=WithBoard(), source="again") == loaded
    (told,) = load(registry=WithBoard(), board_project="p").notices
    assert told == "board_project: has no effect, since logger my-board is not used by this run"
    assert "pip install surogate-log-wandb" in message(wandb_project="p")


def test_report_to_takes_a_name_a_list_or_none() -> None:
    assert config(report_to=["console", "my-board", "console"]).report_to == ("console", "my-board")
    assert config(report_to="none").report_to == config(report_to=[]).report_to == ()


def test_dtypes_take_the_names_of_torch_and_reach_the_precision_request() -> None:
    request = config(torch_dtype="bfloat16", master_dtype="float32", matmul_dtype="e4m3").precision_request
    assert (request.model_dtype, request.master_dtype, request.matmul_dtype) == ("bf16", "fp32", "e4m3")
    assert config(torch_dtype="auto").model_dtype is None
    assert "keep one" in message(torch_dtype="bf16", model_dtype="fp32")


def test_recompute_covers_what_its_parts_cover() -> None:
    assert config(recompute_block=True).recompute == {"block", "att", "ffn", "rmsnorm", "qkv", "swiglu"}
    assert config(recompute_attention=True).recompute == {"att", "qkv"}
    assert config(recompute_ffn=True).recompute == {"ffn", "swiglu"}


def test_a_validation_set_leaves_the_training_data_whole() -> None:
    c = config(validation_datasets=[{"path": "v.txt"}], validation_split_ratio=0.2)
    assert c.validation_split_ratio == 0.0
    assert config(validation_datasets=[]).validation_split_ratio == 0.1


def test_environment_variables_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_HOME", "/data")
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.delenv("NOT_SET", raising=False)
    c = config(output_dir="${DATA_HOME}/o$$1", max_steps="$STEPS", datasets=[{"path": "$DATA_HOME/a.txt"}])
    assert (c.output_dir, c.max_steps, c.datasets[0].path) == ("/data/o$1", 7, "/data/a.txt")
    assert "output_dir: the environment variable NOT_SET is not set" in message(output_dir="$NOT_SET/x")
    assert "names no environment variable" in message(output_dir="${}")


# -------------------------------------------------------------------------------------------------------------- keys


def test_an_unknown_key_names_the_nearest() -> None:
    assert "did you mean gradient_accumulation_steps?" in message(gradient_acumulation_steps=2)
    assert "did you mean learning_rate?" in message(lr=1e-4)
    assert "did you mean sgd_momentum?" in message(sgd_momemtum=0.5)
    assert "did you mean learning_rate?" in message(**{"Learning-Rate": 1})
    assert "datasets.0.sampels: unknown key; did you mean samples?" in message(datasets=[{"path": "x", "sampels": 2}])
    assert "unknown key; the config reference lists all keys" in message(**{"x" * 5000: 1})


def test_everything_wrong_is_told_at_once() -> None:
    lines = message(num_epochs=0, learning_rate="x", nonsense=1, offload_grads=True, optimizer="none-such").splitlines()
    assert len(lines) == 5 and all(line.startswith("run.yaml: ") for line in lines)
    many = message(**{f"zz{index}": 1 for index in range(500)})
    assert many.endswith("and 480 more problems")


def test_a_census_key_set_to_its_default_is_accepted_and_to_another_value_is_not_yet() -> None:
    def nested(key: str, value: Any) -> dict[str, Any]:
        section, dot, inner = key.partition(".")
        return {section: {inner: value}} if dot else {key: value}

    for key, entry in NOT_YET.items():
        for value in (entry.default, *entry.inert, None):
            assert load(**nested(key, value)) == load(), key
        text = message(**nested(key, "something else"))
        assert text.startswith(f"run.yaml: {key}: not yet: ") and "'something else'" in text and entry.instead in text
    assert load(fp8_amax_history="1024", qlora_bnb="false") == load()


@pytest.mark.parametrize(("key", "value"), [("attn_bwd_chunks", 2), ("zero_level", 3)])
def test_a_value_whose_feature_is_not_built_is_not_yet(key: str, value: Any) -> None:
    assert f"{key}: not yet: " in message(**{key: value})


def test_names_of_the_census_without_a_package_are_not_yet() -> None:
    keys = {"recipe": "recipe", "optimizer": "optimizer", "logger": "report_to"}
    for (kind, name), instead in NOT_YET_NAMES.items():
        given_keys = {"datasets": [{"path": "x", "type": name}]} if kind == "format" else {keys[kind]: name}
        text = message(**given_keys)
        assert "not yet" in text and name in text and instead in text


def test_what_is_not_built_in_sections_and_datasets_is_named_in_place() -> None:
    assert "distributed.num_nodes: not yet" in message(distributed={"num_nodes": 2})
    assert "distributed.nodes: unknown key; did you mean num_nodes?" in message(distributed={"nodes": 2})
    assert "distributed: must be a section" in message(distributed=3)
    entry = {"path": "x", "chosen": "good"}
    assert "datasets.0.chosen: not yet" in message(datasets=[entry])


def test_a_key_that_nothing_reads_is_refused_at_any_value_that_could_mean_something() -> None:
    for key, entry in DEAD.items():
        for value in (None, *entry.accepted):
            assert load(**{key: value}) == load() and load(**{key: value}).notices == (), key
        for value in ("something else", 7, {"a": 1}):
            text = message(**{key: value})
            assert text.startswith(f"run.yaml: {key}: nothing reads this key (got ") and entry.instead in text
    assert "system_prompt (type: instruction) or system_field (conversation)" in message(system="Be brief.")
    assert "in the entry of datasets" in message(use_chat_template=False)


def test_a_key_that_can_change_nothing_gives_one_notice() -> None:
    loaded = load(**dict.fromkeys(IGNORED, "x"))
    assert loaded == load()
    assert [notice.partition(":")[0] for notice in loaded.notices] == list(IGNORED)
    assert load(model_type=None).notices == ()


def test_what_would_be_written_or_initialised_is_refused_where_it_cannot_be() -> None:
    assert "merge_adapter: writes base + adapter, but lora is false" in message(merge_adapter=True)
    assert "init_projections_to_zero: sets new weights, but from_scratch is false" in message(
        init_projections_to_zero=True
    )


def test_every_key_of_the_original_is_accepted_at_its_default_or_has_a_reason() -> None:
    """`data/original_keys.yaml`: key -> default, as its documents had them. `DEFAULTS_REFUSED`: what we cannot do."""
    registry = WithAdapter(wandb=WandbOptions, qwen=AdamWAll)
    refused = {}
    for key, value in read_yaml(Path(__file__).parent / "data/original_keys.yaml").items():
        section, dot, inner = key.partition(".")
        try:
            load("sft", registry, **({section: {inner: value}} if dot else {key: value}))
        except SurogateError as error:
            refused[key] = str(error)
    assert {key: text for key, text in refused.items() if key not in DEFAULTS_REFUSED} == {}
    assert refused.keys() == DEFAULTS_REFUSED.keys()
    assert all(DEFAULTS_REFUSED[key] in text for key, text in refused.items())


DEFAULTS_REFUSED = {"optimizer": "adamw_8bit: not yet"}
"""Key -> what the error says of the original's default."""


class WandbOptions(BaseModel):
    wandb_project: str = "Surogate"
    wandb_name: str | None = None


class AdamWAll(BaseModel):
    adamw_beta2: float = 0.999
    adamw_epsilon: float = 1e-8


def test_recompute_is_the_originals_word_for_recompute_block() -> None:
    assert config(recompute=True) == config(recompute_block=True)
    assert config(recompute="none") == config(recompute=False) == config()
    assert "given twice" in message(recompute=True, recompute_block=False)


def test_an_adapter_is_not_merged_before_training_only_where_there_is_one() -> None:
    lora = {"lora": True, "registry": WithAdapter()}
    assert config(adapter_init_mode="merge", **lora) == config(**lora)
    assert config(adapter_init_mode="trainable", adapter_path="a", **lora).adapter_path == "a"
    assert "adapter_init_mode: not yet" in message(adapter_init_mode="merge", adapter_path="a", **lora)


FOREIGN = {
    "logging_dir": "output_dir",
    "num_train_epochs": "num_epochs",
    "output_directory": "output_dir",
    "micro_batch_size": "per_device_train_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_device_eval_batch_size": "per_device_train_batch_size",
    "cutoff_len": "sequence_len",
    "gradient_checkpointing": "recompute_block: true",
    "bf16": "model_dtype: bf16",
    "fp16": "fp16 is not built",
    "optim": "optimizer",
    "flash_attention": "fused",
    "val_set_size": "validation_split_ratio",
    "lora_target_linear": "lora_target_modules: [all-linear]",
    "load_in_4bit": "QLoRA is not built",
    "train_on_inputs": "loss_scale: all",
    "enable_activation_checkpointing": "recompute_block",
    "evaluation_strategy": "eval_steps",
}
"""Names of Trainer, axolotl, Unsloth, LLaMA-Factory and torchtune -> what the error must name."""


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_of_another_trainer_is_answered_with_what_to_write_here(name: str) -> None:
    text = message(**{name: 1})
    assert text.startswith(f"run.yaml: {name}: unknown key; ") and FOREIGN[name] in text


def test_no_hint_is_for_a_key_that_is_read() -> None:
    ours = {*TrainConfig.model_fields, *NOT_YET, *DEAD, *IGNORED, *ALIASES, *PACKAGES}
    assert not ours & HINTS.keys() and not ours & ELSEWHERE.keys() and not HINTS.keys() & ELSEWHERE.keys()
    assert all(name == name.lower() and "-" not in name for name in (*HINTS, *ELSEWHERE))


def test_the_words_of_keys_that_are_not_built_help() -> None:
    assert "remove the key: lora: true trains over frozen weights in bf16" in message(qlora_fp8=True)
    assert not any("lora: false" in entry.instead for entry in NOT_YET.values())
    page = (Path(__file__).parents[1] / "docs/reference/config.md").read_text()
    assert "on the CPU so far" not in page


def test_an_alias_and_its_key_may_not_disagree() -> None:
    assert "given twice" in message(recompute_att=False, recompute_attention=True)
    for alias, key in ALIASES.items():
        assert key in TrainConfig.model_fields or key in NOT_YET, alias


def test_the_tables_speak_of_keys_that_exist_and_no_key_has_two_places() -> None:
    core = TrainConfig.model_fields.keys()
    for table in (NOT_YET, DEAD, IGNORED, PACKAGES, ALIASES):
        assert not core & table.keys()
    assert set(ELSEWHERE.values()) <= {*core, *PACKAGES} and not core & ELSEWHERE.keys()
    assert all(limit.key in core for limit in LIMITS)
    assert all(entry.key in core or entry.key in NOT_YET for entry in DIFFERS)
    assert all(info.description for info in TrainConfig.model_fields.values())


# ----------------------------------------------------------------------------------------------------------- plugins


def test_options_of_the_selected_plugins_are_flat_keys() -> None:
    loaded = load(optimizer="sgd", sgd_momentum="0.5")
    assert loaded.optimizer_options == SgdOptions(sgd_momentum=0.5)
    assert loaded.recipe_options == NoOptions()
    assert set(loaded.options) == {("recipe", "bf16"), ("optimizer", "sgd"), ("launcher", "local")}


def test_options_of_an_unselected_plugin_are_checked_and_told_to_have_no_effect() -> None:
    assert load(sgd_momentum=0.5).notices == (
        "sgd_momentum: has no effect, since optimizer sgd is not used by this run",
    )
    assert "sgd_momentum: must be less than 1" in message(sgd_momentum=2)


@pytest.mark.parametrize(
    ("key", "value"), [("sgd_steps", True), ("sgd_steps", 1.5), ("sgd_momentum", "nan"), ("sgd_nesterov", "perhaps")]
)
def test_options_of_plugins_are_as_strict_as_core(key: str, value: Any) -> None:
    assert f"run.yaml: {key}: must be" in message(optimizer="sgd", **{key: value})


def test_a_plugin_takes_over_a_key_that_was_not_yet() -> None:
    class Normuon(BaseModel):
        normuon_momentum: float = 0.95

    loaded = load(registry=FakeRegistry(normuon=Normuon), optimizer="NorMuon", normuon_momentum=0.5)
    assert loaded.optimizer_options == Normuon(normuon_momentum=0.5)


def test_a_missing_plugin_is_a_plugin_error_in_the_registrys_words() -> None:
    with pytest.raises(PluginError, match=r"^run.yaml: optimizer: lion — no installed plugin") as caught:
        load(optimizer="lion")
    assert caught.value.distribution == "d"
    assert "did you mean adamw?" in message(optimizer="adamv")


def test_a_key_of_a_package_that_is_not_installed_names_the_package() -> None:
    registry = FakeRegistry()
    registry.optimizers = {"sgd": SgdOptions}
    with pytest.raises(ConfigError, match="adamw_beta1: no installed plugin has this key; pip install surogate-optim"):
        load(registry=registry, optimizer="sgd", adamw_beta1=0.5)


def test_dataset_options_are_validated_by_their_type() -> None:
    entry = {"path": "x", "type": "text", "sample_by": "line"}
    assert config(datasets=[entry]).datasets[0].options == {"sample_by": "line"}
    assert config(datasets=[{"path": "x", "text_field": "body"}]).datasets[0].options == {"text_field": "body"}
    assert "datasets.0.sample_by: must be 'document'" in message(datasets=[{**entry, "sample_by": "word"}])
    assert "datasets.1.path: is required" in message(datasets=[entry, {}])


def test_planning_needs_no_data_and_training_does() -> None:
    loaded = load(datasets=None)
    with pytest.raises(ConfigError, match=r"run.yaml: datasets: is required"):
        loaded.require_datasets()
    assert load().require_datasets()[0].path == "data.txt"


# ---------------------------------------------------------------------------------------------------------- resolved


def test_a_resolved_config_loads_as_an_equal_config(tmp_path: Path) -> None:
    loaded = load(
        run_name="1e5",
        output_dir="out$$dir",
        log_file="no",
        torch_dtype="bf16",
        optimizer="sgd",
        sgd_momentum=0.25,
        learning_rate=1e-5,
        report_to="my-board",
        datasets=[{"path": "a", "type": "text", "sample_by": "line", "samples": 3}, {"path": "b", "subset": "0123"}],
        validation_datasets=[{"path": "v"}],
    )
    values = resolved(loaded)
    (tmp_path / "run.yaml").write_text(dump_yaml(values), encoding="utf-8")
    assert json.loads(json.dumps(values)) == values == read_yaml(tmp_path / "run.yaml")
    assert load_config(values, registry=FakeRegistry(), mode="sft", source="run.yaml").config == loaded.config
    again = load_config(values, registry=FakeRegistry(), mode="train", source="run.yaml")
    assert again == loaded and resolved(again) == values and again.notices == ()


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(10**18), 10**18)
            | st.floats(allow_nan=False)
            | st.text(max_size=12),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_yaml_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "value.yaml"
    path.write_bytes(dump_yaml(value).encode())
    assert read_yaml(path) == value


# -------------------------------------------------------------------------------------------------------------- YAML


def test_yaml_scalars_follow_version_1_2(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "a: 2e-4\nb: no\nc: 0123\nd: 2024-01-01\ne: [1, -2, .5, ~, '']\nf: &x {p: 1}\ng: {<<: *x, q: true}\n"
    )
    assert read_yaml(path) == {
        "a": 2e-4, "b": "no", "c": "0123", "d": "2024-01-01", "e": [1, -2, 0.5, None, ""],
        "f": {"p": 1}, "g": {"p": 1, "q": True},
    }  # fmt: skip


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 8)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "is empty"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"just text", "must be a mapping"),
        (b"a: 1\nb: 2\na: 3\n", "line 3, column 1: the key a is given twice"),
        (b"1: x\n", "line 1, column 1: the key 1 is not text"),
        (b"? [a]\n: x\n", "not text"),
        (b"a: [1, 2\nb: 3\n", "line 2, column 2: not valid YAML"),
        (b"a: b: c\n", "line 1, column 5: not valid YAML"),
        (b"a: *nothing\n", "undefined alias"),
        (b"a: &a [*a]\n", "nested more than"),
        (b"[" * 5000, "nested more than"),
        (BOMB.encode(), "holds more than"),
        (b"a: !!python/object:os.system x\n", "tag"),
        (b"a: !!int x\n", "tag"),
        (b"a: " + b"9" * 5000, "too many digits"),
        (b"a: 1\n---\nb: 2\n", "another document"),
        (b"\xff\xfea\x00", "is not UTF-8"),
        (b"a: \x00\n", "not valid YAML"),
        (b"a: x" * 300_000, "is larger than"),
    ],
)
def test_a_file_that_is_no_config_is_told_with_its_place(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}: ") and says in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_a_path_that_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        read_yaml(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml("a\0b")


def test_overrides_are_yaml_and_reach_inside() -> None:
    raw = {"model": "m", "distributed": {"num_nodes": 1}, "datasets": [{"path": "a"}]}
    changed = apply_overrides(
        raw,
        ["learning_rate=2e-4", "distributed.num_nodes=2", "datasets.0.path=x=y", "datasets.1.path=z",
         "report_to=[a, b]", "model=", "validation_datasets.0.path=v"],
    )  # fmt: skip
    assert changed == {
        "model": None, "distributed": {"num_nodes": 2}, "datasets": [{"path": "x=y"}, {"path": "z"}],
        "learning_rate": 2e-4, "report_to": ["a", "b"], "validation_datasets": [{"path": "v"}],
    }  # fmt: skip
    assert raw == {"model": "m", "distributed": {"num_nodes": 1}, "datasets": [{"path": "a"}]}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model", "must look like key=value"),
        ("=x", "must look like key=value"),
        ("a..b=x", "must look like key=value"),
        ("model.name=x", "inside 'm'"),
        ("datasets.path=x", "index from 0 to 1"),
        ("datasets.7.path=x", "index from 0 to 1"),
        ("model=[a", "not valid YAML"),
    ],
)
def test_a_bad_override_is_told(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"model": "m", "datasets": [{"path": "a"}]}, [override])
    assert str(caught.value).startswith(f"--set {override}: ") and says in str(caught.value)


# -------------------------------------------------------------------------------------------------- page and start-up


def test_the_committed_reference_is_the_generated_one() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "config.md"
    done = subprocess.run([sys.executable, "-m", "surogate_core.cli.config_reference"], capture_output=True, check=True)
    assert page.read_bytes() == done.stdout, "regenerate docs/reference/config.md"


def test_reading_a_config_imports_no_torch() -> None:
    code = (
        "import sys, surogate_core.config.load; print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
