"""RoPE parameters in `config.json`: the base, and the scaling of the frequencies for a context longer than pre-trained.

transformers 5 writes `rope_parameters: {rope_type, rope_theta, ...}`. transformers 4 writes `rope_theta` and, if there
is a scaling, `rope_scaling: {type or rope_type, ...}`. The scaling is an attribute of the RoPE ops;
`reference.inverse_frequencies` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Any

from .config_json import boolean, integer, is_given, positive, wrong


@dataclass(frozen=True)
class Linear:
    """Divide every frequency by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Scale frequencies by wavelength.

    Wavelengths above original_positions / low_freq_factor are multiplied by `factor`. Wavelengths below
    original_positions / high_freq_factor are unchanged. Those in between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True)
class Yarn:
    """Scale frequencies by pair index (Peng et al. 2023, arXiv:2309.00071).

    Frequencies of pairs up to `first` are unchanged, those from `last` on are divided by `factor`, and those in between
    are interpolated. `first` and `last` need not be integers.
    """

    factor: float
    first: float
    last: float


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True)
class Rope:
    """RoPE parameters. Sines and cosines of the angles are multiplied by `attention_factor`.

    max_positions: number of positions that the scaling extends the context to, or 0 without an extension.
    """

    theta: float
    scaling: Scaling | None = None
    attention_factor: float = 1.0
    max_positions: int = 0

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the ops `rope` and `qk_norm_rope`."""
        return {"theta": self.theta, "scaling": self.scaling, "attention_factor": self.attention_factor}


def read_rope(config: Mapping[str, Any], head_dim: int, *, default_theta: float | None = None) -> Rope:
    """Read the RoPE parameters of a parsed `config.json`.

    As in transformers, a non-empty `rope_scaling` takes precedence over `rope_parameters`. `default_theta` applies if
    `rope_theta` is given in neither the mapping nor the config. Raises ConfigError for types other than default,
    linear, dynamic, yarn and llama3, for multimodal, per-layer-type or partial RoPE, and for invalid values.
    """
    _refuse_unbuilt(config)
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given: Mapping[str, Any] = config.get(key) or {}
    within = f"{key}."
    if "rope_theta" in given:
        theta = positive(given, "rope_theta", within=within)
    else:
        theta = positive(config, "rope_theta", default=default_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "linear":
        factor = _factor(given, within)
        positions = integer(config, "max_position_embeddings") if is_given(config, "max_position_embeddings") else 0
        return Rope(theta, Linear(factor), max_positions=int(factor * positions))
    if kind == "yarn":
        return _yarn(config, given, within, theta, head_dim)
    if kind == "llama3":
        return Rope(theta, _llama3(config, given, within))
    if kind == "dynamic":  # affects only sequences longer than max_position_embeddings, which no run has
        _factor(given, within)
    elif kind != "default":
        raise wrong(f"{within}rope_type", "must be default, linear, dynamic, yarn or llama3", kind)
    return Rope(theta)


def _refuse_unbuilt(config: Mapping[str, Any]) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise wrong(key, "must be a mapping", given)
        if any(isinstance(value, Mapping) for value in given.values()):
            raise wrong(key, "different RoPE parameters per layer type are not supported yet", dict(given))
        if is_given(given, "mrope_section"):
            raise wrong(f"{key}.mrope_section", "multimodal RoPE is not supported yet", given["mrope_section"])
        _refuse_partial(given, f"{key}.")
    _refuse_partial(config, "")


def _refuse_partial(given: Mapping[str, Any], within: str) -> None:
    if given.get("partial_rotary_factor") not in (None, 1):
        key = f"{within}partial_rotary_factor"
        raise wrong(key, "partial RoPE is not supported yet; must be 1", given["partial_rotary_factor"])


def _factor(given: Mapping[str, Any], within: str) -> float:
    factor = positive(given, "factor", within=within)
    if factor < 1:
        raise wrong(f"{within}factor", "must be at least 1", given["factor"])
    return factor


def _original_positions(config: Mapping[str, Any], given: Mapping[str, Any], within: str) -> int:
    """Return the context length of the pre-training.

    In order of precedence: `original_max_position_embeddings` of the config, the same key in the RoPE mapping,
    `max_position_embeddings`.
    """
    if is_given(config, "original_max_position_embeddings"):
        return integer(config, "original_max_position_embeddings")
    if is_given(given, "original_max_position_embeddings"):
        return integer(given, "original_max_position_embeddings", within=within)
    return integer(config, "max_position_embeddings")


def _llama3(config: Mapping[str, Any], given: Mapping[str, Any], within: str) -> Llama3:
    low = positive(given, "low_freq_factor", within=within)
    high = positive(given, "high_freq_factor", within=within)
    if high <= low:
        raise wrong(f"{within}high_freq_factor", f"must be greater than low_freq_factor {low}", high)
    return Llama3(_factor(given, within), low, high, _original_positions(config, given, within))


def _yarn(config: Mapping[str, Any], given: Mapping[str, Any], within: str, theta: float, head_dim: int) -> Rope:
    """Return YaRN parameters.

    A pair that makes at least `beta_fast` rotations over the original positions is unchanged; one that makes at most
    `beta_slow` rotations is scaled. The attention factor grows with `factor`, which sharpens attention.
    """
    factor = _factor(given, within)
    original = _original_positions(config, given, within)
    fast, slow = (
        positive(given, key, within=within) if given.get(key) else default
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if fast < slow:
        raise wrong(f"{within}beta_fast", f"must not be less than beta_slow {slow}", fast)
    if theta <= 1:
        raise wrong("rope_theta", "must be greater than 1 with yarn", theta)

    def pair_with_rotations(count: float) -> float:
        return head_dim * log(original / (count * 2 * pi)) / (2 * log(theta))

    first, last = pair_with_rotations(fast), pair_with_rotations(slow)
    if boolean(given, "truncate", default=True, within=within):
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as in transformers: avoids a division by zero
    return Rope(theta, Yarn(factor, first, last), _attention_factor(given, within, factor), int(factor * original))


def _attention_factor(given: Mapping[str, Any], within: str, factor: float) -> float:
    if is_given(given, "attention_factor"):
        return positive(given, "attention_factor", within=within)

    def mscale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        numerator, denominator = (positive(given, key, within=within) for key in ("mscale", "mscale_all_dim"))
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)
