"""The error that a format and a dtype bring into weights, which says how far a right server may be off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from surogate_core.errors import ConfigError

DTYPES: Final[Mapping[str, float]] = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Dtype of torch -> largest relative rounding error of a number."""

NAMES: Final[Mapping[str, str]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Dtype of torch -> its name in configs."""

FORMATS: Final[Mapping[str, float]] = {"fp8-channel": 0.037, "fp8-blocks": 0.038, "nvfp4": 0.095, "nf4": 0.092}
"""Export format -> rms error of products, relative to the weights. FP8 rounds activations as it rounds weights."""

FACTOR: Final = 2.0
"""Times the distance to the same model with random errors of that size in its weights."""

FLOOR: Final = 2e-5
"""Log probabilities that are computed in fp32, in another order of sums, may be off by this."""


class ServedAs(NamedTuple):
    """A form of weights in a server. dtype: of torch, "auto" for that of the files. error: of a format, in weights."""

    dtype: str
    error: float


def served_as(name: str | None) -> ServedAs:
    """Return what a dtype or an export format brings; None: the dtype of the files. Raises ConfigError otherwise."""
    if name is None:
        return ServedAs("auto", 0.0)
    for dtype, short in NAMES.items():
        if name == short:
            return ServedAs(dtype, 0.0)
    if (error := FORMATS.get(name.partition(":")[0])) is not None:
        return ServedAs("auto", error)
    raise ConfigError(f"--format {name}: no bound is known for it. Known: {', '.join([*NAMES.values(), *FORMATS])}.")
