"""The key `rope_scaling`: RoPE scaling from the YAML file that replaces the model's own. Imports no torch.

The types, and the settings each needs, are checked by the model, which reads the config.json that is made here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .errors import nearest
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


def with_rope_scaling(
    config: Mapping[str, Any], scaling: Mapping[str, Any] | None, max_model_len: int | None
) -> dict[str, Any]:
    """Return a model's parsed config.json with `scaling`, if given, as its RoPE scaling. The RoPE base is kept.

    The default of `factor` is `max_model_len` divided by the model's own length, rounded up. The result has the keys
    `rope_scaling` and `rope_theta`, which transformers 4 and 5 read alike.
    """
    if scaling is None:
        return dict(config)
    given = [config.get(key) for key in ("rope_scaling", "rope_parameters")]
    before: Mapping[str, Any] = next((found for found in given if found and isinstance(found, dict)), {})
    made = dict(scaling)
    length = made.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if "factor" not in made and max_model_len is not None and isinstance(length, int) and length > 0:
        made["factor"] = float(max(1, -(-max_model_len // length)))
    replaced = {"rope_scaling", "rope_parameters", *made}
    kept = {key: value for key, value in config.items() if key not in replaced}
    theta = {"rope_theta": before["rope_theta"]} if "rope_theta" in before else {}
    return {**kept, **theta, "rope_scaling": made}
