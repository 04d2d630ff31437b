"""Models whose sizes hold the options of a run."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel

from ..api import ModelDef


def configured(model: ModelDef, options: BaseModel) -> ModelDef:
    """Return the model whose `dims` are those that it has with these options."""
    return replace(
        model,
        dims=lambda config: model.configure(model.dims(config), options),
        configure=lambda dims, options: dims,
    )
