"""Outer models: a class of transformers around the text of a family, such as one with a vision tower.

Its config.json has the sizes of the text in `text_config`, or beside the other keys in files of transformers 4. The
program is that of the text. The rest of a checkpoint is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from surogate_core.api import IMAGE_TEXT_TO_TEXT, ConfigError, ModelDef, RowChoice, WeightMap

from .config_json import invalid, is_given, read_bool

_TEXT = "text_config"
_TIED = "tie_word_embeddings"
_INNER, LANGUAGE_MODEL = "model.", "model.language_model."
BEFORE_LANGUAGE_MODEL: Mapping[str, str] = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""Names of published checkpoints that transformers before 4.52 has written, and 5 writes again."""

_NOT_PARTS = (_TEXT, "quantization_config", "generation_config")


def outer(
    text: ModelDef,
    *,
    name: str,
    summary: str,
    architecture: str,
    model_type: str,
    text_types: Sequence[str],
    towers: Mapping[str, Sequence[str]],
    tied: bool,
    place: str = LANGUAGE_MODEL,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    may_lack: Sequence[str] = (),
    published_names: Sequence[Mapping[str, str]] = (),
    dims: Callable[[Mapping[str, Any]], Any] | None = None,
) -> ModelDef:
    """Return the model of an outer class, whose text is that of `text`.

    text_types  values of `text_config["model_type"]` that it may have. With `model_type` among them, a config.json
                without `text_config` has the keys of the text itself.
    towers      {key of config.json that describes another part: patterns of its tensors, which are kept}
    tied        the default of `tie_word_embeddings` of the outer class. Embedding and LM head are one unless that key
                or that of the text is false: transformers ties no tensors that differ in the files.
    place       the beginning of the names of the text's tensors in the outer class, in place of "model."
    defaults    of keys that published files leave out of `text_config`
    may_lack    patterns of further tensors that are kept where files have them: `ModelDef.may_lack`
    published_names  see `ModelDef`
    dims        reads the sizes of the text, if not `text.dims`
    """
    read = dims or text.dims

    def named(name: str) -> str:
        return f"{place}{name.removeprefix(_INNER)}" if name.startswith(_INNER) else name

    def renamed(stored: WeightMap) -> WeightMap:
        tensors = tuple(replace(tensor, name=named(tensor.name)) for tensor in stored.tensors)
        return replace(stored, tensors=tensors, parameter=named(stored.parameter))

    def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
        given = config.get(_TEXT, config if model_type in text_types else None)
        if not isinstance(given, Mapping):
            raise invalid(_TEXT, "must be the config of the text model", given)
        if (kind := given.get("model_type", text_types[0])) not in text_types:
            raise invalid(f"{_TEXT}.model_type", f"must be {' or '.join(text_types)}", kind)
        for key in towers:
            if not is_given(config, key):
                raise invalid(key, f"is required by {architecture}", config.get(key))
        for key, part in config.items():
            if key.endswith("_config") and isinstance(part, Mapping) and key not in (*_NOT_PARTS, *towers):
                raise invalid(key, f"{architecture} has no such part here; use a model without it", part)
        both = {**defaults, **{key: value for key, value in given.items() if key not in towers}}
        return {**both, _TIED: read_bool(config, _TIED, default=tied) and read_bool(both, _TIED, default=True)}

    def read_text(config: Mapping[str, Any]) -> Any:
        found = text_of(config)
        try:
            return read(found)
        except ConfigError as error:
            raise ConfigError(f"{_TEXT}.{error}") from None

    def row_choice(config: Mapping[str, Any], length: int) -> RowChoice | None:
        choice = text.row_choice(text_of(config), length)
        return choice and replace(choice, config={**config, _TEXT: choice.config})

    return replace(
        text,
        name=name,
        summary=summary,
        architectures=(architecture,),
        model_types=(model_type,),
        dims=read_text,
        weights=lambda d: [renamed(m) for m in text.weights(d)],
        published_weights=lambda d: [[renamed(m) for m in form] for form in text.published_weights(d)],
        ignored_tensors=lambda d: [named(pattern) for pattern in text.ignored_tensors(d)],
        tied_copies=lambda d: {named(copy): named(original) for copy, original in text.tied_copies(d).items()},
        kept_tensors=lambda d: [*(pattern for patterns in towers.values() for pattern in patterns), *may_lack],
        may_lack=lambda d: may_lack,
        published_names=lambda d: published_names,
        row_choice=row_choice,
        loaded_by=IMAGE_TEXT_TO_TEXT,
    )
