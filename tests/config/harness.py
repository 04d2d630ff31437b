"""A registry without discovery, and short ways to load a config with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from surogate.config.adapter import Mode
from surogate.config.load import LoadedConfig, load_config
from surogate.config.schema import TrainConfig
from surogate_core.api import DatasetFormatDef, Encoded, LauncherDef, NoOptions, WeightFormatDef, World
from surogate_core.errors import PluginError, SurogateError
from surogate_lora.options import LoraOptions
from surogate_offload_residual.plugin import ResidualOptions
from surogate_offload_states.plugin import GradientOptions, MasterOptions, OptimizerOptions, QuantOptions, WeightOptions
from surogate_qlora_fp4.options import Fp4WeightOptions
from surogate_qlora_fp8.options import Fp8WeightOptions
from surogate_qlora_nf4.options import Nf4Options
from surogate_recipes_fp8.recipe import Fp8Options
from surogate_recipes_nvfp4.recipe import Nvfp4Options


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
    """Three optimizers, a recipe, a logger and the text format; no discovery."""

    def __init__(self, **options: type[BaseModel]) -> None:
        self.optimizers: dict[str, type[BaseModel]] = dict.fromkeys(("adamw_8bit", "adamw"), AdamWOptions) | {
            "sgd": SgdOptions,
            **options,
        }

    option_conflicts: Mapping[str, str] = {}

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        optimizers = {("optimizer", name): model for name, model in self.optimizers.items()}
        return {("recipe", "bf16"): NoOptions, **optimizers}

    def dataset_formats(self) -> Mapping[str, DatasetFormatDef]:
        return {"text": TEXT}

    def weight_formats(self) -> Mapping[str, WeightFormatDef]:
        return {}

    def launchers(self) -> Mapping[str, LauncherDef]:
        return {"local": LauncherDef(name="local", summary="", join=lambda here, options: World())}

    def names(self, kind: str) -> list[str]:
        return {
            "recipe": ["bf16"],
            "optimizer": list(self.optimizers),
            "logger": ["console", "my-board"],
            "format": ["text"],
            "adapter": [],
            "launcher": list(self.launchers()),
            "offload": [],
            "weight format": [],
            "loss": ["next_token"],
        }[kind]

    def failed(self, kind: str, name: str, function: str, cause: BaseException) -> PluginError | None:
        return PluginError(f"{kind} {name} failed in {function}: {cause!r}")

    def missing(self, kind: str, name: str) -> PluginError:
        return PluginError(f"{kind}: {name} — no installed plugin provides it")


class WithAdapter(FakeRegistry):
    """With LoRA, the FP8 and FP4 recipes, offload strategies and weight formats installed."""

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        installed = {
            ("adapter", "lora"): LoraOptions,
            ("recipe", "fp8-hybrid"): Fp8Options,
            ("recipe", "nvfp4"): Nvfp4Options,
            ("offload", "residual"): ResidualOptions,
            ("offload", "optimizer"): OptimizerOptions,
            ("offload", "master"): MasterOptions,
            ("offload", "grads"): GradientOptions,
            ("offload", "weights"): WeightOptions,
            ("offload", "quants"): QuantOptions,
            ("weight format", "nf4"): Nf4Options,
            ("weight format", "fp8"): Fp8WeightOptions,
            ("weight format", "fp4"): Fp4WeightOptions,
        }
        return {**super().options_models(), **installed}

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
