"""A run as its user asked for it: the config, the plugins, and the model's files. Nothing of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from surogate_core.api import (
    CAUSAL_LM,
    WRITES_TEXT,
    AdapterDef,
    Dims,
    LossDef,
    ModelDef,
    PrepareContext,
    Prepared,
    WeightFormatDef,
)
from surogate_core.assembly.configured import configured
from surogate_core.errors import ConfigError, PluginError
from surogate_core.plugins.registry import Registry

from ..config.load import LoadedConfig
from ..config.model_options import of_model
from ..config.rope_scaling import with_rope_scaling
from ..config.schema import TrainConfig
from ..data.asked import Asked
from ..hub.config_json import QUANTIZATION, read_config, refused_quantized, text_part, with_text_part
from ..hub.files import CONFIG_FILES, resolve_model_dir
from .chosen_format import FILES, chosen_format
from .published_form import Form, form_of, unquantized
from .published_weights import in_form_of_folder


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run before it is planned for a device: config, model, adapter and weight format.

    model_dir     the folder of the model's files
    model_config  its parsed config.json, with the run's `rope_scaling`, and without the config of `form`
    model, dims   the model that the config.json names, with the head of the run's loss and with its options, in the
                  form that its files hold, and its sizes
    adapter       the adapter that is trained and its options; None if all weights are trained
    weight_format how frozen weights are stored, and its options; None: in the model's dtype
    form          the form of the files, whose weights the run reads in floating point; None: they are in it already, or
                  in that of `weight_format`
    """

    loaded: LoadedConfig
    registry: Registry
    model_dir: Path
    model_config: Mapping[str, Any]
    model: ModelDef
    dims: Dims
    adapter: tuple[AdapterDef, BaseModel] | None
    weight_format: tuple[WeightFormatDef, BaseModel] | None
    form: Form | None = None

    @property
    def config(self) -> TrainConfig:
        return self.loaded.config

    @property
    def model_options(self) -> BaseModel:
        return self.loaded.options["model", self.model.name]


def open_run(loaded: LoadedConfig, registry: Registry, patterns: Sequence[str] = CONFIG_FILES) -> Run:
    """Find the model of a config and the plugin that builds it.

    `patterns` are the files of the model that must be local: its config to plan, its tokenizer and weights to train.
    Raises ConfigError if the model cannot be found or no plugin builds it.
    """
    config = loaded.config
    model_dir = resolve_model_dir(config.model, patterns)
    model_config = read_config(model_dir)
    text = with_rope_scaling(text_part(model_config), config.rope_scaling, config.max_model_len)
    model_config = with_text_part(model_config, text)
    refuse_merge_format(config, registry)
    loss = chosen_loss(loaded, registry)
    given = model_config, model_dir, loaded.options["loss", loss.name]
    model = registry.model_for(model_config, lambda model: loss.model(model, *given) if loss.model else model)
    try:
        read = model.dims(model_config)
    except ConfigError as error:
        scaled = "" if config.rope_scaling is None else f", with the rope_scaling of {loaded.source}"
        raise ConfigError(f"{config.model}/config.json{scaled}: {error}") from None
    loaded = of_model(loaded, model)
    options = loaded.options["model", model.name]
    weight_format, form = _stored_as(loaded, registry, model_dir, model_config)
    model, dims = configured(model, options), model.configure(read, options)
    if not config.from_scratch:
        model = in_form_of_folder(model, dims, model_dir)
    adapters = [
        (of_weights(_headed(registry.adapter(name), model, config), model, dims), given)
        for name, given in loaded.adapters.items()
    ]
    return Run(
        loaded=loaded,
        registry=registry,
        model_dir=model_dir,
        model_config=model_config if form is None else unquantized(model_config),
        model=model,
        dims=dims,
        adapter=next(iter(adapters), None),
        weight_format=weight_format,
        form=form,
    )


def refuse_merge_format(config: TrainConfig, registry: Registry) -> None:
    """Raise ConfigError or PluginError if the merged model cannot be written in the format that a config names."""
    if config.merge_format == FILES:
        return
    chosen = chosen_format(registry, config.merge_format, "merge_format:")
    if chosen.format.of_adapters:
        raise ConfigError(
            f"merge_format: {chosen}: is for adapters by themselves. Leave it out, and export the adapter."
        )


def named_model(
    model_config: Mapping[str, Any], registry: Registry, folder: Path | None = None
) -> tuple[ModelDef, Dims]:
    """Return the model that a parsed config.json names, and its sizes with the defaults of its options.

    folder: that of its weights, in whose form its weight maps then are. Raises ConfigError if no plugin builds it.
    """
    model = registry.model_for(model_config)
    dims = model.configure(model.dims(model_config), model.options())
    return model if folder is None else in_form_of_folder(model, dims, folder), dims


def of_weights(adapter: AdapterDef, model: ModelDef, dims: Dims) -> AdapterDef:
    """Return the adapter whose files know the weights of a model."""
    return adapter if adapter.of_model is None else adapter.of_model(adapter, model.weights(dims))


def _headed(adapter: AdapterDef, model: ModelDef, config: TrainConfig) -> AdapterDef:
    """Return the adapter for a model that may have the head of a loss or towers. Raises ConfigError if it cannot have
    the first."""
    if model.loaded_by == CAUSAL_LM or (model.loaded_by in WRITES_TEXT and adapter.with_head is None):
        return adapter
    if adapter.with_head is None:
        raise ConfigError(
            f"loss: {config.loss} trains a head of its own, which adapter {adapter.name} does not save. Use another "
            "adapter, or train all weights."
        )
    if config.merge_adapter and model.loaded_by not in WRITES_TEXT:
        raise ConfigError(
            f"merge_adapter: true: is not built for the head of loss: {config.loss}. Remove the key, and merge the "
            "adapter with its library."
        )
    return adapter.with_head(adapter, model)


def asked_by(loaded: LoadedConfig, registry: Registry) -> Asked:
    """Return what the run's loss asks of its data."""
    loss = chosen_loss(loaded, registry)
    options = loaded.options["loss", loss.name]
    return Asked(loss.name, tuple(loss.columns(options)), loss.group_size, loss.prepass, loss.prepare, options)


def chosen_loss(loaded: LoadedConfig, registry: Registry) -> LossDef:
    """Return the run's loss. With `reference: cached`, it reads a column, which training fills, and no reference."""
    loss = registry.loss(loaded.config.loss)
    if loaded.config.reference != "cached":
        return replace(loss, cached_reference=None)
    if (column := loss.cached_reference) is None or loss.group_size < 2:
        raise ConfigError(f"reference: cached: loss: {loss.name} reads no reference that can be kept. Remove the key.")

    def prepare(context: PrepareContext[Any]) -> Prepared:
        import numpy as np  # a plan needs neither data nor numpy

        return Prepared({column.name: np.zeros(len(context.offsets) - 1, np.float32)})

    return replace(
        loss,
        reference=lambda options: False,
        columns=lambda options: (*loss.columns(options), column),
        prepare=prepare,
    )


def _stored_as(
    loaded: LoadedConfig, registry: Registry, model_dir: Path, model_config: Mapping[str, Any]
) -> tuple[tuple[WeightFormatDef, BaseModel] | None, Form | None]:
    """Return the weight format of a run, with its options, and the form that its files are read by, if by none.

    Raises ConfigError if the model's files hold what neither reads.
    """
    found, config = chosen_weight_format(loaded, registry), model_config.get(QUANTIZATION)
    if config is None:
        return found, None
    where = f"{model_dir / 'config.json'}: {QUANTIZATION}: "
    if loaded.config.from_scratch:
        raise ConfigError(
            f"{where}describes stored weights, but from_scratch: true draws new ones in floating point. Remove "
            f"{QUANTIZATION} from the file, or name the original model."
        )
    formats = [f for f in registry.weight_formats().values() if f.checkpoints and f.checkpoints.matches(config)]
    if found is None or found[0] not in formats:
        if form := form_of(registry, model_dir, model_config):
            return found, form
    elif loaded.config.merge_adapter and form_of(registry, model_dir, model_config) is None:
        raise refused_quantized(model_dir, "merge_adapter: true needs the others")
    if len(formats) > 1:
        both = " and ".join(str(f.origin or f.name) for f in formats[:2])
        raise PluginError(f"{where}both {both} read it. Uninstall one of them.")
    stored = next(iter(formats), None)
    if stored is None or stored.checkpoints is None:
        why = f"No installed weight format or checkpoint form reads quant_method: {config.get('quant_method')}"
        raise refused_quantized(model_dir, why)
    selected = found is not None and found[0] is stored
    try:  # before the advice to select the format: it may refuse these files
        stored.checkpoints.check(config, loaded.options["weight format", stored.name])
    except ConfigError as error:
        reads = f"{stored.key}: true reads quant_method: {config.get('quant_method')}, but for this model: "
        raise ConfigError(f"{where}{'' if selected else reads}{error}") from None
    if not selected:
        raise refused_quantized(model_dir, f"To train an adapter on them, set {stored.key}: true. Otherwise")
    return found, None


def chosen_weight_format(loaded: LoadedConfig, registry: Registry) -> tuple[WeightFormatDef, BaseModel] | None:
    """Return the weight format that a key selects, with its options."""
    for name, format in registry.weight_formats().items():
        options = loaded.options["weight format", name]
        if getattr(options, format.key):
            registry.refuse_rivals("key of a weight format", format.key)
            registry.refuse_rivals("weight format", name)
            return format, options
    return None
