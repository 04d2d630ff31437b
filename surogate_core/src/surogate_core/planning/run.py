"""A run as its user asked for it: the config, the plugins, and the model's files. Nothing of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..api import AdapterDef, Dims, ModelDef
from ..config.load import LoadedConfig
from ..config.rope_scaling import with_rope_scaling
from ..config.schema import TrainConfig
from ..errors import ConfigError
from ..hub.config_json import read_config
from ..hub.files import CONFIG_FILES, resolve_model_dir
from ..plugins.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is, before it is planned for a device.

    model_dir     the folder of the model's files
    model_config  its parsed config.json, with the run's `rope_scaling`
    model, dims   the model that the config.json names, and its sizes
    adapter       the adapter that is trained and its options; None if all weights are trained
    """

    loaded: LoadedConfig
    registry: Registry
    model_dir: Path
    model_config: Mapping[str, Any]
    model: ModelDef
    dims: Dims
    adapter: tuple[AdapterDef, BaseModel] | None

    @property
    def config(self) -> TrainConfig:
        return self.loaded.config


def open_run(loaded: LoadedConfig, registry: Registry, patterns: Sequence[str] = CONFIG_FILES) -> Run:
    """Find the model of a config and the plugin that builds it.

    `patterns` are the files of the model that must be local: its config to plan, its tokenizer and weights to train.
    Raises ConfigError if the model cannot be found or no plugin builds it.
    """
    config = loaded.config
    model_dir = resolve_model_dir(config.model, patterns)
    model_config = with_rope_scaling(read_config(model_dir), config.rope_scaling, config.max_model_len)
    model = registry.model_for(model_config)
    try:
        dims = model.dims(model_config)
    except ConfigError as error:
        scaled = "" if config.rope_scaling is None else f", with the rope_scaling of {loaded.source}"
        raise ConfigError(f"{config.model}/config.json{scaled}: {error}") from None
    adapters = [(registry.get("adapter", name), options) for name, options in loaded.adapters.items()]
    return Run(
        loaded=loaded,
        registry=registry,
        model_dir=model_dir,
        model_config=model_config,
        model=model,
        dims=dims,
        adapter=next(iter(adapters), None),
    )
