"""The form in which files hold a model's weights, where it is published in several. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from surogate_core.api import Dims, ModelDef, WeightMap

from ..hub.stored_bytes import stored_bytes
from .stored_names import StoredNames


def in_form_of(model: ModelDef, dims: Dims, held: Collection[str]) -> ModelDef:
    """Return the model with the weight maps of the form that files have: of all, the one of which `held`, the names of
    their tensors, has the most."""
    forms = [model.weights(dims), *model.published_weights(dims)]
    if len(forms) == 1:
        return model
    names = [StoredNames(begins) for begins in ({}, *model.published_names(dims))]

    def count(maps: Sequence[WeightMap]) -> int:
        tensors = [tensor.name for m in maps for tensor in m.tensors]
        return max(sum(form.of(name) in held for name in tensors) for form in names)

    found = max(range(len(forms)), key=lambda i: count(forms[i]))
    return model if found == 0 else _with_form(model, found - 1)


def in_form_of_folder(model: ModelDef, dims: Dims, folder: Path) -> ModelDef:
    """Return the model with the form of the weights in a folder; as it is if that has none, as for a plan."""
    if not model.published_weights(dims):
        return model
    return in_form_of(model, dims, stored_bytes(folder) or ())


def _with_form(model: ModelDef, index: int) -> ModelDef:
    return replace(
        model, weights=lambda d: model.published_weights(d)[index], published_weights=lambda d: [model.weights(d)]
    )
