"""The options of a run's model. The model is known when its files are read, later than the keys of the config."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel

from surogate_core.api import ModelDef

from .errors import keys_of
from .load import LoadedConfig
from .options import SELECTED_BY_FILES, Owner, idle_notice


def of_model(loaded: LoadedConfig, model: ModelDef) -> LoadedConfig:
    """Return the config with the options of its model, and without those of others: a notice for each key of these."""
    owner = (SELECTED_BY_FILES, model.name)
    used = {other: options for other, options in loaded.options.items() if other[0] != SELECTED_BY_FILES}
    used[owner] = loaded.options.get(owner, model.options())
    return replace(loaded, options=used, model=model.name, notices=(*loaded.notices, *_idle(loaded, used)))


def _idle(loaded: LoadedConfig, used: dict[Owner, BaseModel]) -> list[str]:
    read = {key for options in used.values() for key in keys_of(type(options))}
    unread: dict[str, list[Owner]] = {}
    for owner, options in loaded.options.items():
        if owner not in used:
            for key in {*_given(options)} - read:
                unread.setdefault(key, []).append(owner)
    return [idle_notice(key, owners) for key, owners in sorted(unread.items())]


def _given(options: BaseModel) -> list[str]:
    """Return the keys of a config that have set `options`."""
    fields = type(options).model_fields
    return [key for key, name in zip(keys_of(type(options)), fields, strict=True) if name in options.model_fields_set]
