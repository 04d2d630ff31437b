"""Linear modules that PEFT finds by `target_parameters`, as `...gate_proj.weight`.

transformers once held experts as linear modules of the names below, and PEFT takes these names in `target_modules` of a
mixture for its experts of today, in all layers: an adapter of a dense or a shared MLP would have no place. By the name
of its weight, PEFT adapts the same module with the same tensors. PEFT's all-linear names routers so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from surogate_core.api import ConfigError, read_json_object

T = TypeVar("T")

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json that may hold the number of experts."""

WEIGHT = ".weight"
_TAKEN = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
_ROUTER = "router"
"""A name of routers whose class in transformers is none of linear modules: PEFT adapts their weight alone."""

_ALSO_WEIGHT = r"(\.weight)?"


def named_by_weight(modules: Iterable[str], base_model: str) -> list[str]:
    """Return those of `modules` that PEFT must find by their weights in this base."""
    found = [module for module in modules if module.rpartition(".")[2] in (*_TAKEN, _ROUTER)]
    return found if found and any(_config(base_model).get(key) for key in COUNTS) else []


def _config(base_model: str) -> Mapping[str, Any]:
    """Return the config.json of a base, a folder or a hub id that a run has read; empty if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        folder = Path(base_model).expanduser()
        path = folder / "config.json" if folder.is_dir() else try_to_load_from_cache(base_model, "config.json")
        return read_json_object(Path(path)) if isinstance(path, str | Path) else {}
    except (ConfigError, OSError, RuntimeError, ValueError):  # neither a model nor the name of one
        return {}


def with_weights(patterns: Mapping[str, T]) -> dict[str, T]:
    """Return patterns that also fit the weight of a module that they fit."""
    return {f"({pattern}){_ALSO_WEIGHT}": value for pattern, value in patterns.items()}


def without_weights(patterns: Mapping[str, T]) -> dict[str, T]:
    """Return what `with_weights` was given; other patterns as they are."""
    form = re.compile(rf"\((.*)\){re.escape(_ALSO_WEIGHT)}", re.DOTALL)
    return {found[1] if (found := form.fullmatch(pattern)) else pattern: v for pattern, v in patterns.items()}
