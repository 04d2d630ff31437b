"""The options of plugins and of dataset types as flat keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from config.harness import FakeRegistry, SgdOptions, WithAdapter, config, load, message
from pydantic import BaseModel, ConfigDict, Field

from surogate.config.load import LoadedConfig, load_config, resolved
from surogate_core.api import NoOptions, WeightFormatDef
from surogate_core.errors import ConfigError, PluginError
from surogate_qlora_fp4.format import FP4
from surogate_qlora_fp8.format import FP8
from surogate_qlora_nf4.format import NF4


def test_options_of_the_selected_plugins_are_flat_keys() -> None:
    loaded = load(optimizer="sgd", sgd_momentum="0.5")
    assert loaded.optimizer_options == SgdOptions(sgd_momentum=0.5)
    assert loaded.recipe_options == NoOptions()
    assert set(loaded.options) == {
        ("recipe", "bf16"),
        ("optimizer", "sgd"),
        ("launcher", "local"),
        ("loss", "next_token"),
    }


def test_options_of_an_unselected_plugin_are_validated_and_give_a_notice() -> None:
    assert load(sgd_momentum=0.5).notices == (
        "sgd_momentum: has no effect, since optimizer sgd is not used by this run",
    )
    assert "sgd_momentum: must be less than 1" in message(sgd_momentum=2)


@pytest.mark.parametrize(
    ("key", "value"), [("sgd_steps", True), ("sgd_steps", 1.5), ("sgd_momentum", "nan"), ("sgd_nesterov", "perhaps")]
)
def test_options_of_plugins_are_validated_as_strictly_as_keys_of_core(key: str, value: Any) -> None:
    assert f"run.yaml: {key}: must be" in message(optimizer="sgd", **{key: value})


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    shelf: int = Field(1, ge=1)
    locked: bool = False


class Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    place: Place = Field(default_factory=Place)


def test_a_field_that_is_a_model_is_a_section_of_keys() -> None:
    registry = FakeRegistry(kept=Kept)
    loaded = load(registry=registry, optimizer="kept", place={"shelf": "2", "locked": "yes"})
    assert loaded.optimizer_options == Kept(place=Place(shelf=2, locked=True))
    assert load_config(resolved(loaded), registry=registry, source="run.yaml") == loaded
    default = load(registry=registry, optimizer="kept", place={"shelf": None})
    assert default == load(registry=registry, optimizer="kept")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"shelf": 0}, "place.shelf: must be at least 1 (got 0)"),
        ({"shelf": True}, "place.shelf: must be a number (got true)"),
        ({"locked": "perhaps"}, "place.locked: must be true or false (got 'perhaps')"),
        ({"shelfs": 1}, "place.shelfs: unknown key; did you mean shelf?"),
        ({"room": 1}, "place.room: unknown key; the keys here are locked, shelf"),
        ("here", "place: must be a section of keys (got 'here')"),
    ],
)
def test_errors_inside_a_section_of_a_plugin_name_the_dotted_key(section: Any, says: str) -> None:
    for optimizer in ("kept", "sgd"):  # selected or not
        with pytest.raises(ConfigError) as caught:
            load(registry=FakeRegistry(kept=Kept), optimizer=optimizer, place=section)
        assert str(caught.value) == f"run.yaml: {says}"


class Counted(BaseModel):
    held: bool | int = Field(False, ge=0)
    sgd_scale: Literal["match-adamw", "paper"] = "paper"
    exact: bool = False
    picks: bool | Literal["all-of-them"] = True


@pytest.mark.parametrize(
    ("value", "means"),
    [(1, 1), (1.0, 1), ("1", 1), ("1.0", 1), (2.0, 2), (True, True), ("yes", True), ("OFF", False), (0, 0)],
)
def test_a_flag_or_count_of_a_plugin_is_read_as_it_is_written(value: Any, means: bool | int) -> None:
    loaded = load(registry=FakeRegistry(my_sgd=Counted), optimizer="my_sgd", held=value)
    held = getattr(loaded.optimizer_options, "held")  # noqa: B009
    assert (held, type(held)) == (means, type(means))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("held", 1.5, "held: must be true, false or a whole number (got 1.5)"),
        ("held", "y", "held: must be true, false or a whole number (got 'y')"),
        ("held", -1, "held: must be at least 0"),
        ("exact", 1, "exact: must be true or false (got 1)"),
        ("exact", "t", "exact: must be true or false (got 't')"),
        ("picks", "some", "picks: must be true, false or all-of-them (got 'some')"),
        ("picks", 1, "picks: must be true, false or all-of-them (got 1)"),
        ("sgd_scale", "best", "sgd_scale: must be 'match-adamw' or 'paper'"),
    ],
)
def test_flags_counts_and_choices_of_plugins_are_refused_as_those_of_core(key: str, value: Any, says: str) -> None:
    assert says in message(registry=FakeRegistry(my_sgd=Counted), optimizer="my_sgd", **{key: value})


@pytest.mark.parametrize(
    ("value", "means"), [(True, True), ("yes", True), ("OFF", False), ("All_Of_Them", "all-of-them")]
)
def test_a_flag_or_word_of_a_plugin_is_read_as_it_is_written(value: Any, means: bool | str) -> None:
    loaded = load(registry=FakeRegistry(my_sgd=Counted), optimizer="my_sgd", picks=value)
    assert loaded.optimizer_options == Counted.model_construct(picks=means)


def test_choices_of_plugins_are_folded() -> None:
    loaded = load(registry=FakeRegistry(my_sgd=Counted), optimizer="my_sgd", sgd_scale="Match_AdamW", exact=" TRUE ")
    assert loaded.optimizer_options == Counted(sgd_scale="match-adamw", exact=True)


def test_a_plugin_can_declare_a_key_that_core_lists_as_not_built() -> None:
    class Chunked(BaseModel):
        sequence_chunks: int = 1

    assert "sequence_chunks: not yet" in message(sequence_chunks=2)
    loaded = load(registry=FakeRegistry(my_sgd=Chunked), optimizer="My-SGD", sequence_chunks=2)
    assert loaded.optimizer_options == Chunked(sequence_chunks=2)


def test_a_key_of_several_plugins_names_all_of_them_if_the_run_uses_none() -> None:
    (notice,) = load(registry=WithAdapter(), skip_quant_last_layers=1).notices
    assert notice == (
        "skip_quant_last_layers: has no effect, since recipe fp8-hybrid or recipe nvfp4 is not used by this run"
    )
    (notice,) = load(registry=WithAdapter(), no_fp4_hadamard=True).notices
    assert notice == "no_fp4_hadamard: has no effect, since recipe nvfp4 is not used by this run"


def test_a_missing_plugin_raises_the_plugin_error_of_the_registry() -> None:
    with pytest.raises(PluginError, match=r"^run.yaml: optimizer: lion — no installed plugin"):
        load(optimizer="lion")
    assert "did you mean adamw?" in message(optimizer="adamv")


def test_a_key_of_a_package_that_is_not_installed_names_the_package() -> None:
    registry = FakeRegistry()
    registry.optimizers = {"sgd": SgdOptions}
    with pytest.raises(ConfigError, match="adamw_beta1: no installed plugin has this key; pip install surogate-optim"):
        load(registry=registry, optimizer="sgd", adamw_beta1=0.5)


class WithFormats(WithAdapter):
    """With the weight formats of the project."""

    def weight_formats(self) -> Mapping[str, WeightFormatDef]:
        return {format.name: format for format in (NF4, FP8, FP4)}

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        formats = {("weight format", name): format.options for name, format in self.weight_formats().items()}
        return {**super().options_models(), **formats}

    def names(self, kind: str) -> list[str]:
        return list(self.weight_formats()) if kind == "weight format" else super().names(kind)


def with_formats(**keys: Any) -> LoadedConfig:
    return load(registry=WithFormats(), lora=True, **keys)


def test_keys_of_a_weight_format_that_is_not_selected_give_a_notice_that_names_the_key_that_selects_it() -> None:
    assert with_formats(qlora_bnb_double_quant=True, qlora_block_size=64, qlora_fp4=False).notices == (
        "qlora_bnb_double_quant: has no effect, since weight format nf4 is not used by this run "
        "(qlora_bnb: true selects it)",
        "qlora_block_size: has no effect, since weight format fp8 is not used by this run (qlora_fp8: true selects it)",
    )
    (notice,) = with_formats(qlora_fp8=True, qlora_block_size=64, qlora_four_over_six=False).notices
    assert notice.startswith("qlora_four_over_six: has no effect, since weight format fp4 is not used")
    assert "qlora_bnb_block_size: must be" in message(registry=WithFormats(), lora=True, qlora_bnb_block_size=3)


def test_a_written_config_has_no_keys_of_weight_formats_without_effect() -> None:
    loaded = with_formats(qlora_fp8=True, qlora_block_size=64, qlora_bnb_double_quant=False)
    written = resolved(loaded)
    found = {key: value for key, value in written.items() if key.startswith("qlora")}
    assert found == {"qlora_bnb": False, "qlora_fp4": False, "qlora_fp8": True, "qlora_block_size": 64}
    again = load_config(written, registry=WithFormats(), source="again")
    assert again == loaded and again.notices == ()


class WithBoard(FakeRegistry):
    """With a logger that has an option."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)
        board_project: str = "Surogate"

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        return {**super().options_models(), ("logger", "my-board"): self.Options}


def test_the_keys_of_a_logger_are_read_when_report_to_selects_it() -> None:
    loaded = load(registry=WithBoard(), report_to="my_board", board_project="p")
    assert loaded.options["logger", "my-board"] == WithBoard.Options(board_project="p")
    assert resolved(loaded)["board_project"] == "p"
    assert load_config(resolved(loaded), registry=WithBoard(), source="again") == loaded
    (notice,) = load(registry=WithBoard(), board_project="p").notices
    assert notice == "board_project: has no effect, since logger my-board is not used by this run"
    assert "pip install surogate-log-wandb" in message(wandb_project="p")


def test_report_to_takes_a_name_a_list_or_none() -> None:
    assert config(report_to=["console", "my-board", "console"]).report_to == ("console", "my-board")
    assert config(report_to="none").report_to == config(report_to=[]).report_to == ()


def test_dataset_options_are_validated_by_their_type() -> None:
    entry = {"path": "x", "type": "text", "sample_by": "line"}
    assert config(datasets=[entry]).datasets[0].options == {"sample_by": "line"}
    assert config(datasets=[{"path": "x", "text_field": "body"}]).datasets[0].options == {"text_field": "body"}
    assert "datasets.0.sample_by: must be 'document'" in message(datasets=[{**entry, "sample_by": "word"}])
    assert "datasets.1.path: is required" in message(datasets=[entry, {}])
