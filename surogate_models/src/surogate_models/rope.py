"""RoPE parameters in `config.json`: the base, and the scaling of the frequencies for a context longer than pre-trained.

transformers 5 writes `rope_parameters: {rope_type, rope_theta, ...}`. transformers 4 writes `rope_theta` and, if there
is a scaling, `rope_scaling: {type or rope_type, ...}`. The scaling is an attribute of the RoPE ops;
`reference.inverse_frequencies` applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor, inf, log, pi, sqrt
from typing import Any

from surogate_core.api import RowChoice

from .config_json import invalid, is_given, read_bool, read_int, read_positive


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


@dataclass(frozen=True)
class Divided:
    """Divide the frequency of every pair by a factor of its own."""

    factors: tuple[float, ...]


Scaling = Linear | Llama3 | Yarn | Divided


@dataclass(frozen=True)
class LongRope:
    """The factors of LongRoPE (Ding et al. 2024, arXiv:2402.13753), one for each pair.

    `short` are those of rows of up to `original_positions` tokens, `long` those of longer rows.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int


@dataclass(frozen=True)
class QueryScaling:
    """A factor of queries that grows with the position: 1 + beta * ln(1 + floor(position / length)).

    It multiplies whole query heads, after RoPE. It is 1 at the first `length` positions of a document.
    """

    beta: float
    length: int


@dataclass(frozen=True)
class Rope:
    """RoPE parameters. Sines and cosines of the angles are multiplied by `attention_factor`.

    max_positions  number of positions that the scaling extends the context to, or 0 without an extension
    rotary_dim     number of elements that are rotated, the first ones of a head; 0: all
    query_scaling  factor of queries by position, or None
    """

    theta: float
    scaling: Scaling | LongRope | None = None
    attention_factor: float = 1.0
    max_positions: int = 0
    rotary_dim: int = 0
    query_scaling: QueryScaling | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the ops `rope` and `qk_norm_rope`. Only `rope` has `query_scaling`."""
        more: dict[str, Any] = {"rotary_dim": self.rotary_dim} if self.rotary_dim else {}
        if self.query_scaling is not None:
            more["query_scaling"] = self.query_scaling
        return {"theta": self.theta, "scaling": self.scaling, "attention_factor": self.attention_factor, **more}

    def of_rows(self, seq_len: int) -> Rope:
        """Return the parameters for rows of `seq_len` tokens. A factor that is 1 at all their positions is left out."""
        rope = self
        if rope.query_scaling is not None and seq_len <= rope.query_scaling.length:
            rope = replace(rope, query_scaling=None)
        if isinstance(rope.scaling, LongRope):
            short = seq_len <= rope.scaling.original_positions
            rope = replace(rope, scaling=Divided(rope.scaling.short if short else rope.scaling.long))
        return rope


def unrotated(head_dim: int) -> Rope:
    """Return RoPE that leaves heads as they are: all its frequencies are 0. For layers without RoPE in an op that has
    it."""
    return Rope(1.0, Divided((inf,) * (head_dim // 2)))


def long_rope_of_rows(config: Mapping[str, Any], ropes: Iterable[Rope], length: int) -> RowChoice | None:
    """Return the factors of LongRoPE for rows of `length` tokens; None if all documents in them have the short ones."""
    original = min((r.scaling.original_positions for r in ropes if isinstance(r.scaling, LongRope)), default=length)
    if length <= original:
        return None
    says = (
        f"LongRoPE: sequence_len: {length} is above original_max_position_embeddings ({original}), so the long factors "
        f"are those of all documents; transformers takes the short ones for texts of up to {original} tokens. With "
        f"sequence_len: {original} or less both take the short ones."
    )
    return RowChoice(says, {key: _always_long(value) for key, value in config.items()})


def _always_long(value: Any) -> Any:
    """Return a value of config.json in which mappings with long factors have no others."""
    if not isinstance(value, Mapping):
        return value
    long = {"short_factor": value["long_factor"]} if value.get("long_factor") else {}
    return {**{key: _always_long(entry) for key, entry in value.items()}, **long}


def read_rope(config: Mapping[str, Any], head_dim: int, *, default_theta: float | None = None) -> Rope:
    """Read the RoPE parameters of a parsed `config.json` of a family that rotates whole heads.

    As in transformers, a non-empty `rope_scaling` takes precedence over `rope_parameters`. `default_theta` applies if
    `rope_theta` is given in neither the mapping nor the config. Raises ConfigError for types other than default,
    linear, dynamic, yarn, llama3 and longrope, for per-layer-type or partial RoPE, and for invalid values.

    With `mrope_section`, elements of a head have positions of their own: in time, height and width. All three are equal
    in text, so this is RoPE, which type mrope is then too.
    """
    for given, within in _mappings(config):
        if given.get(_PARTIAL) not in (None, 1):
            raise invalid(
                f"{within}{_PARTIAL}", "partial RoPE is not supported by this model; must be 1", given[_PARTIAL]
            )
    return _read(config, head_dim, default_theta)


def read_partial_rope(config: Mapping[str, Any], head_dim: int, *, default_theta: float | None = None) -> Rope:
    """As `read_rope`, of a family that rotates `partial_rotary_factor` of each head, rounded down."""
    # The mapping that counts comes first, the config itself last.
    found = next(((given, within) for given, within in _mappings(config) if is_given(given, _PARTIAL)), None)
    if found is None:
        return _read(config, head_dim, default_theta)
    given, within = found
    factor = read_positive(given, _PARTIAL, within=within)
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2:
        reason = f"must rotate an even number of the {head_dim} elements of a head"
        raise invalid(f"{within}{_PARTIAL}", reason, given[_PARTIAL])
    rope = _read(config, rotary_dim, default_theta)
    return rope if rotary_dim == head_dim else replace(rope, rotary_dim=rotary_dim)


def read_rope_by_layer_type(config: Mapping[str, Any], head_dim: int, kind: str, *, theta: float, scaled: bool) -> Rope:
    """As `read_rope`, of layers of a kind, such as full_attention: `rope_parameters` has a mapping for each kind.

    theta: the base if that mapping gives none. scaled: whether `rope_scaling` of transformers 4 is for these layers.
    """
    given = config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or not all(isinstance(value, Mapping | None) for value in given.values()):
        raise invalid("rope_parameters", "must have a mapping for full_attention and for sliding_attention", given)
    scaling = (config.get("rope_scaling") or {}) if scaled else {}
    if not isinstance(scaling, Mapping):
        raise invalid("rope_scaling", "must be a mapping", scaling)
    if "type" in scaling and "rope_type" not in scaling:
        raise invalid(
            "rope_scaling.type", "is ignored by transformers 5 in this family; name it rope_type", scaling["type"]
        )
    own = {"rope_theta": theta, **(given.get(kind) or {}), **scaling}
    rest = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    return read_rope({**rest, "rope_parameters": own}, head_dim)


def read_query_scaling(config: Mapping[str, Any]) -> QueryScaling | None:
    """Return the factor of queries by position: `llama_4_scaling_beta` of the RoPE mapping; None if that is 0.

    `length` is `original_max_position_embeddings` of this mapping, where transformers puts that of the scaling.
    """
    _refuse_unbuilt(config)
    given, within = _counted(config)
    key = "llama_4_scaling_beta"
    beta = 0.0 if given.get(key) == 0 and given[key] is not False else read_positive(given, key, within=within)
    if _kind(given) in ("yarn", "llama3", "longrope"):
        length = _original_positions(config, given, within)
    else:
        length = read_int(given, "original_max_position_embeddings", within=within)
    return QueryScaling(beta, length) if beta else None


_PARTIAL = "partial_rotary_factor"


def _read(config: Mapping[str, Any], head_dim: int, default_theta: float | None) -> Rope:
    """`head_dim`: the number of elements that are rotated."""
    _refuse_unbuilt(config)
    given, within = _counted(config)
    if "rope_theta" in given:
        theta = read_positive(given, "rope_theta", within=within)
    else:
        theta = read_positive(config, "rope_theta", default=default_theta)
    kind = _kind(given)
    if is_given(given, "mrope_section") or kind == "mrope":
        _check_sections(given, within, head_dim // 2)
    if kind == "linear":
        factor = _factor(given, within)
        positions = read_int(config, "max_position_embeddings") if is_given(config, "max_position_embeddings") else 0
        return Rope(theta, Linear(factor), max_positions=int(factor * positions))
    if kind == "yarn":
        return _yarn(config, given, within, theta, head_dim)
    if kind == "llama3":
        return Rope(theta, _llama3(config, given, within))
    if kind == "longrope":
        return _longrope(config, given, within, theta, head_dim)
    if kind == "dynamic":  # affects only sequences longer than max_position_embeddings, which no run has
        _factor(given, within)
    elif kind not in ("default", "mrope"):
        raise invalid(f"{within}rope_type", "must be default, linear, dynamic, yarn, llama3 or longrope", kind)
    return Rope(theta)


def _check_sections(given: Mapping[str, Any], within: str, pairs: int) -> None:
    """Raise ConfigError unless `mrope_section` divides the pairs of a head over time, height and width.

    The layout, which `mrope_interleaved` says, is of no effect where the three positions are equal.
    """
    sections = given.get("mrope_section")
    if (
        not isinstance(sections, list | tuple)
        or len(sections) != 3
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sections)
        or sum(sections) != pairs
    ):
        raise invalid(f"{within}mrope_section", f"must be three whole numbers with the sum {pairs}", sections)
    read_bool(given, "mrope_interleaved", within=within)


def _kind(given: Mapping[str, Any]) -> Any:
    return given.get("rope_type", given.get("type", "default"))


def _counted(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the mapping that counts, empty if there is none, and its prefix in messages."""
    key = _counts(config)
    return config.get(key) or {}, f"{key}."


def _refuse_unbuilt(config: Mapping[str, Any]) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise invalid(key, "must be a mapping", given)
        if any(isinstance(value, Mapping) for value in given.values()):
            raise invalid(key, "different RoPE parameters per layer type are not supported yet", dict(given))


def _mappings(config: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the mapping that counts, if it is one, and the config itself, each with its prefix in messages."""
    if isinstance(config.get(key := _counts(config)), Mapping):
        yield config[key], f"{key}."
    yield config, ""


def _counts(config: Mapping[str, Any]) -> str:
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _factor(given: Mapping[str, Any], within: str) -> float:
    factor = read_positive(given, "factor", within=within)
    if factor < 1:
        raise invalid(f"{within}factor", "must be at least 1", given["factor"])
    return factor


def _original_positions(config: Mapping[str, Any], given: Mapping[str, Any], within: str) -> int:
    """Return the context length of the pre-training.

    In order of precedence: `original_max_position_embeddings` of the config, the same key in the RoPE mapping,
    `max_position_embeddings`.
    """
    if is_given(config, "original_max_position_embeddings"):
        return read_int(config, "original_max_position_embeddings")
    if is_given(given, "original_max_position_embeddings"):
        return read_int(given, "original_max_position_embeddings", within=within)
    return read_int(config, "max_position_embeddings")


def _llama3(config: Mapping[str, Any], given: Mapping[str, Any], within: str) -> Llama3:
    low = read_positive(given, "low_freq_factor", within=within)
    high = read_positive(given, "high_freq_factor", within=within)
    if high <= low:
        raise invalid(f"{within}high_freq_factor", f"must be greater than low_freq_factor {low}", high)
    return Llama3(_factor(given, within), low, high, _original_positions(config, given, within))


def _yarn(config: Mapping[str, Any], given: Mapping[str, Any], within: str, theta: float, head_dim: int) -> Rope:
    """Return YaRN parameters.

    A pair that makes at least `beta_fast` rotations over the original positions is unchanged; one that makes at most
    `beta_slow` rotations is scaled. The attention factor grows with `factor`, which sharpens attention.
    """
    original = _original_positions(config, given, within)
    if "factor" in given and given["factor"] is None:  # null: what extends the context to that of the model
        given = {**given, "factor": read_int(config, "max_position_embeddings") / original}
    factor = _factor(given, within)
    fast, slow = (
        read_positive(given, key, within=within) if given.get(key) else default
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if fast < slow:
        raise invalid(f"{within}beta_fast", f"must not be less than beta_slow {slow}", fast)
    if theta <= 1:
        raise invalid("rope_theta", "must be greater than 1 with yarn", theta)

    def pair_with_rotations(count: float) -> float:
        return head_dim * log(original / (count * 2 * pi)) / (2 * log(theta))

    first, last = pair_with_rotations(fast), pair_with_rotations(slow)
    if read_bool(given, "truncate", default="truncate" not in given, within=within):  # null: false
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as in transformers: avoids a division by zero
    return Rope(theta, Yarn(factor, first, last), _attention_factor(given, within, factor), int(factor * original))


def _attention_factor(given: Mapping[str, Any], within: str, factor: float) -> float:
    if is_given(given, "attention_factor"):
        return read_positive(given, "attention_factor", within=within)

    def mscale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        numerator, denominator = (read_positive(given, key, within=within) for key in ("mscale", "mscale_all_dim"))
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def _longrope(config: Mapping[str, Any], given: Mapping[str, Any], within: str, theta: float, head_dim: int) -> Rope:
    """Return LongRoPE parameters. The attention factor grows with that of the context, for short rows too."""
    original = _original_positions(config, given, within)
    if is_given(given, "factor"):
        factor = read_positive(given, "factor", within=within)
    else:
        factor = read_int(config, "max_position_embeddings") / original
    if is_given(given, "attention_factor"):
        attention_factor = read_positive(given, "attention_factor", within=within)
    else:
        attention_factor = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
    short, long = (_pair_factors(given, key, within, head_dim // 2) for key in ("short_factor", "long_factor"))
    return Rope(theta, LongRope(short, long, original), attention_factor)


def _pair_factors(given: Mapping[str, Any], key: str, within: str, count: int) -> tuple[float, ...]:
    values = given.get(key)
    if not isinstance(values, list | tuple) or len(values) != count:
        raise invalid(f"{within}{key}", f"must be a list of {count} numbers, one for each pair", values)
    return tuple(read_positive({key: value}, key, within=within) for value in values)
