"""The key `rope_scaling`: RoPE scaling from the YAML file that replaces the model's own. Imports no torch.

The types, and the settings each needs, are checked by the model, which reads the config.json that is made here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from surogate_core.words import nearest

from .values import parse_number

SETTINGS: Final = (
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
)
"""Settings of a scaling besides its type, by their names in config.json."""


def parse_rope_scaling(value: Any) -> dict[str, Any] | None:
    """Accept a type, a mapping with a `rope_type`, or its JSON text; `auto` is None. Raises ValueError otherwise."""
    if isinstance(value, str):
        word = value.strip()
        if word.lower() == "auto":
            return None
        value = _from_json(word) if word.startswith("{") else {"rope_type": word}
    if not isinstance(value, Mapping):
        raise ValueError("must be a type or a mapping with a rope_type")
    given = {key: entry for key, entry in value.items() if entry is not None}
    kinds = {str(given.pop(key)).strip().lower() for key in ("rope_type", "type") if key in given}
    if len(kinds) != 1 or not all(kind.isalnum() for kind in kinds):
        raise ValueError("must have one rope_type")
    for key in given:
        if key not in SETTINGS:
            guess = nearest(key, SETTINGS) if isinstance(key, str) else None
            raise ValueError(f"{key!r} is not a setting" + (f"; did you mean {guess}?" if guess else ""))
    return {"rope_type": kinds.pop(), **{key: _setting(key, entry) for key, entry in given.items()}}


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None


def _setting(key: str, value: Any) -> Any:
    if key == "truncate":
        if not isinstance(value, bool):
            raise ValueError("truncate must be true or false")
        return value
    try:
        number = parse_number(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 2**31:
        raise ValueError(f"{key} must be a number greater than 0")
    if key == "original_max_position_embeddings" and not number.is_integer():
        raise ValueError(f"{key} must be a whole number")
    return int(number) if key == "original_max_position_embeddings" else number


def whole_scaling(config: Mapping[str, Any], scaling: Mapping[str, Any], max_model_len: int | None) -> dict[str, Any]:
    """Return `scaling` with the default of `factor`: `max_model_len` divided by the model's length, rounded up."""
    made = dict(scaling)
    length = made.get(_ORIGINAL, config.get("max_position_embeddings"))
    if "factor" not in made and max_model_len is not None and isinstance(length, int) and length > 0:
        made["factor"] = float(max(1, -(-max_model_len // length)))
    return made


def with_rope_scaling(
    config: Mapping[str, Any], scaling: Mapping[str, Any] | None, max_model_len: int | None
) -> dict[str, Any]:
    """Return a model's parsed config.json with `scaling`, if given, as its RoPE scaling.

    Only the scaling changes. What else the file says about RoPE (bases, partial rotation, layers of other types) stays,
    in the form that the file has: `rope_scaling` of transformers 4, or `rope_parameters` of transformers 5, where a
    mapping by layer type has the scaling in full_attention, as `rope_scaling` is for these layers in transformers.
    """
    if scaling is None:
        return dict(config)
    made = whole_scaling(config, scaling, max_model_len)
    changed = dict(config)
    if _ORIGINAL in made and config.get(_ORIGINAL) is not None:
        changed[_ORIGINAL] = made[_ORIGINAL]  # takes precedence over that in the mapping
    older, newer = (_mapping(config.get(key)) for key in ("rope_scaling", "rope_parameters"))
    if any(isinstance(entry, Mapping) for entry in newer.values()):
        changed.pop("rope_scaling", None)
        whole = _replaced({**_mapping(newer.get(_SCALED_LAYERS)), **older}, made)
        return {**changed, "rope_parameters": {**newer, _SCALED_LAYERS: whole}}
    if newer and not older:
        changed.pop("rope_scaling", None)
        return {**changed, "rope_parameters": _replaced(newer, made)}
    return {**changed, "rope_scaling": _replaced(older, made)}


def longer_scaling(config: Mapping[str, Any], length: int) -> dict[str, Any] | None:
    """Return a scaling that gives a model, of which `config` is the parsed config.json, at least `length` positions.

    A model that is scaled linearly keeps that, with a larger factor. Any other gets YaRN, from the positions that it
    was pre-trained with, if config.json names them, or from all that it has. None: no factor does it, as for LongRoPE,
    whose factors are measured, or config.json does not say how many there are.
    """
    older, newer = (_mapping(config.get(key)) for key in ("rope_scaling", "rope_parameters"))
    own = {**_mapping(newer.get(_SCALED_LAYERS, newer)), **older}
    kind = str(own.get("rope_type", own.get("type", "default")))
    positions = config.get("max_position_embeddings")
    if kind != "linear":
        positions = config.get(_ORIGINAL) or own.get(_ORIGINAL) or positions
    if kind == "longrope" or not isinstance(positions, int) or positions < 1:
        return None
    factor = float(-(-length // positions))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    kept = {key: own[key] for key in SETTINGS if key.startswith("beta_") and own.get(key)} if kind == "yarn" else {}
    return {"rope_type": "yarn", "factor": factor, _ORIGINAL: positions, **kept}


_ORIGINAL: Final = "original_max_position_embeddings"

_SCALED_LAYERS: Final = "full_attention"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _replaced(before: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping of RoPE settings with another scaling."""
    scales = {"rope_type", "type", "short_factor", "long_factor", *SETTINGS}
    return {**{key: value for key, value in before.items() if key not in scales}, **scaling}
