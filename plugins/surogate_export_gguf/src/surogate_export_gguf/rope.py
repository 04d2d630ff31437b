"""RoPE as llama.cpp computes it: a base, a scaling by name, factors of frequencies; proven against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, log, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .families import Family, head_width, refused

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """RoPE of a layer.

    base       rotary base
    width      numbers of a head that are rotated
    scaling    linear, yarn or longrope; "" for none
    factor     what positions are divided by
    original   positions before the context was extended
    attention  what sines and cosines are multiplied by, beside what YaRN of llama.cpp does
    divisors   of the frequencies, by the name of their tensor
    differs    the largest relative difference of a frequency of llama.cpp from one of transformers
    """

    base: float
    width: int
    scaling: str = ""
    factor: float = 1.0
    original: int = 0
    attention: float = 1.0
    divisors: Mapping[str, Floats] = field(default_factory=dict)
    differs: float = 0.0


def rotation_of(text: Any, family: Family, layer_type: str | None = None) -> Rotation:
    """Return the RoPE of a text, or of its layers of a type. Raises ConfigError if llama.cpp has no such RoPE."""
    rope = text.rope_parameters[layer_type] if layer_type else text.rope_parameters
    kind = rope["rope_type"]
    plain: dict[str, Any] = {
        "base": float(rope["rope_theta"]),
        "width": int(head_width(text) * rope.get("partial_rotary_factor", 1.0)),
    }
    if plain["width"] != head_width(text) and not family.partial:
        reason = f"llama.cpp rotates whole heads of {head_width(text)} in its {family.arch.name.lower()}"
        raise refused("partial_rotary_factor", reason, rope["partial_rotary_factor"])
    if kind in ("default", "dynamic"):  # dynamic changes nothing up to max_position_embeddings
        return Rotation(**plain)
    wanted, attention = transformers_rope(text, kind, layer_type)
    original = int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
    if kind == "linear":
        found = Rotation(**plain, scaling="linear", factor=float(rope["factor"]))
    elif kind == "yarn":
        given = float(rope["factor"])
        found = Rotation(
            **plain, scaling="yarn", factor=given, original=original, attention=attention / yarn_scale(given)
        )
    elif kind == "llama3" and family.frequencies:
        divided = frequencies(Rotation(**plain)) / wanted
        found = Rotation(**plain, divisors={"rope_freqs.weight": divided.astype(np.float32)})
    elif kind == "longrope" and (family.frequencies or family.arch.name == "PHI3"):
        both = {f"rope_factors_{x}.weight": np.asarray(rope[f"{x}_factor"], np.float32) for x in ("long", "short")}
        return Rotation(**plain, scaling="longrope", original=original, attention=attention, divisors=both)
    else:
        raise refused("rope_type", f"llama.cpp has no such RoPE in its {family.arch.name.lower()}", kind)
    error = np.abs(served_frequencies(found) / wanted - 1).max()
    if error > 1e-5 and family.untruncated and kind == "yarn" and rope.get("truncate") is False:
        return replace(found, differs=float(error))
    if error > 1e-5:
        reason = (
            f"llama.cpp would rotate by frequencies that differ by up to {error:.1%}; it knows yarn with beta_fast 32, "
        )
        raise refused("rope_parameters", reason + "beta_slow 1 and truncate: true", dict(rope))
    return found


def transformers_rope(text: Any, kind: str, layer_type: str | None) -> tuple[Floats, float]:
    """Return the frequencies and the factor of sines and cosines that transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted, attention = ROPE_INIT_FUNCTIONS[kind](text, "cpu", layer_type=layer_type)
    return wanted.numpy(), float(attention)


def yarn_scale(factor: float) -> float:
    """Return what llama.cpp multiplies sines and cosines of YaRN by."""
    return 1.0 + 0.1 * log(factor) if factor > 1 else 1.0


def frequencies(rotation: Rotation) -> Floats:
    """Return the frequencies without scaling."""
    steps = np.arange(0, rotation.width, 2, dtype=np.float64) / rotation.width
    return (rotation.base**-steps).astype(np.float32)


def served_frequencies(rotation: Rotation) -> Floats:
    """Return the frequencies that llama.cpp computes."""
    plain = frequencies(rotation)
    if rotation.divisors:
        return plain / rotation.divisors["rope_freqs.weight"]
    scaled = plain / np.float32(rotation.factor)
    if rotation.scaling != "yarn":
        return scaled
    low, high = (edge(rotation, turns) for turns in (32.0, 1.0))
    low, high = max(0, floor(low)), min(rotation.width - 1, ceil(high))
    ramp = 1 - np.clip((np.arange(rotation.width // 2) - low) / max(0.001, high - low), 0, 1)
    return (scaled * (1 - ramp) + plain * ramp).astype(np.float32)


def edge(rotation: Rotation, turns: float) -> float:
    """Return the frequency that turns so often in the original context."""
    return rotation.width * log(rotation.original / (turns * 2 * pi)) / (2 * log(rotation.base))
