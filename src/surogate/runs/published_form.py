"""The checkpoint form of a model's files, which are read in floating point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surogate_core.api import CheckpointFormDef
from surogate_core.errors import ConfigError, PluginError
from surogate_core.plugins.registry import Registry

from ..hub.config_json import QUANTIZATION

Form = tuple[CheckpointFormDef, Mapping[str, Any]]
"""A form, and the `quantization_config` that it matches."""


def form_of(registry: Registry, model_dir: Path, model_config: Mapping[str, Any]) -> Form | None:
    """Return the form that the files of a model have; None: no installed plugin reads them, or they need none.

    Raises ConfigError for what the form cannot read, and PluginError if two forms match.
    """
    config = model_config.get(QUANTIZATION)
    if config is None:
        return None
    where = f"{model_dir / 'config.json'}: {QUANTIZATION}: "
    forms = registry.checkpoint_forms()
    found = [form for form in forms.values() if form.matches(config)]
    if len(found) > 1:
        both = " and ".join(str(form.origin or form.name) for form in found[:2])
        raise PluginError(f"{where}both {both} read it. Uninstall one of them.")
    if not found:
        return None
    registry.refuse_rivals("checkpoint form", found[0].name)
    try:
        found[0].check(config)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None
    return found[0], config


def reading_line(form: Form, dtype: str) -> str:
    """Return the line that tells a user what a run in `dtype` reads, and what it will write."""
    return f"weights of the model in {form[0].summary}: read into {dtype}, which outputs are in too"


def unquantized(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model whose weights are in floating point."""
    return {key: value for key, value in model_config.items() if key != QUANTIZATION}
