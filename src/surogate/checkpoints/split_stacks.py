"""Stacks of experts, opened as a matrix for each expert and projection, as another published form has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surogate_core.api import WeightMap
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

from ..hub.config_json import read_config
from ..runs.run import named_model
from .base_files import names_of_base
from .matrix_codec import Matrices


def split_stacks(model_dir: Path, registry: Registry) -> dict[str, Matrices]:
    """Return {name in files: its matrices} of the stacks in a folder, with their names in a form without stacks.

    Stacks of a model that is published in no such form are left out, and so is a model that no plugin builds.
    """
    config = read_config(model_dir)
    try:
        model, dims = named_model(config, registry, model_dir)
    except ConfigError:
        return {}
    names = names_of_base(model_dir, config, registry)
    others = [{m.param: m for m in names.maps(maps)} for maps in model.published_weights(dims)]
    found = {}
    for m in names.maps(model.weights(dims)):
        for split in others:
            if (matrices := _matrices(m, split.get(m.param))) is not None:
                found[matrices.tensor.name] = matrices
    return found


def _matrices(stacked: WeightMap, split: WeightMap | None) -> Matrices | None:
    """Return the matrices of a stack by the tensors of another map of its param; None: it is no stack, or they are."""
    if split is None or len(stacked.tensors) > 1 or not stacked.tensors[0].leading:
        return None
    whole = any(tensor.layout for tensor in split.tensors) or len(split.tensors) % stacked.tensors[0].shape[0]
    return None if whole else Matrices(stacked.tensors[0], split.tensors)


def refuse_changed(stacks: Mapping[str, Matrices], changed: Mapping[str, object]) -> None:
    """Raise ConfigError if an adapter changes a stack: each of its matrices would compute all of it again."""
    if both := sorted(stacks.keys() & changed.keys()):
        raise ConfigError(
            f"{both[0]}: the adapter changes experts that files have in one tensor. Merge it first: surogate merge "
            "ADAPTER MERGED, and export MERGED."
        )
