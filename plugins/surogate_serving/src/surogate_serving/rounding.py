"""The error that a format and a dtype bring into weights, which says how far a right server may be off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from surogate_core.errors import ConfigError

DTYPES: Final[Mapping[str, float]] = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Dtype of torch -> largest relative rounding error of a number."""

NAMES: Final[Mapping[str, str]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Dtype of torch -> its name in configs."""


class Errors(NamedTuple):
    """Rms errors of products, relative to them. inner: of the matrices of the blocks. outer: of embedding and head."""

    inner: float = 0.0
    outer: float = 0.0


FORMATS: Final[Mapping[str, Errors]] = {
    "fp8-channel": Errors(0.037),
    "fp8-blocks": Errors(0.038),
    "nvfp4": Errors(0.095),
    "nf4": Errors(0.092),
    "gguf:f32": Errors(),
    "gguf:f16": Errors(0.0003, 0.0003),
    "gguf:bf16": Errors(0.0024, 0.0024),
    "gguf:q8_0": Errors(0.0076, 0.0076),
    "gguf:q5_1": Errors(0.039, 0.0076),
    "gguf:q5_0": Errors(0.043, 0.0076),
    "gguf:q4_1": Errors(0.079, 0.0076),
    "gguf:q4_0": Errors(0.087, 0.0076),
}
"""Export format -> its errors. FP8 rounds activations as it rounds weights. So does llama.cpp in F16 and BF16, and in
products with other types it rounds them to 8 bits. The weights alone, of Q8_0: 0.0054, BF16: 0.0017, F16: 0.0002."""

FACTOR: Final = 2.0
"""Times the distance to the same model with random errors of that size in its weights."""

FLOOR: Final = 2e-5
"""Log probabilities that are computed in fp32, in another order of sums, may be off by this."""


class ServedAs(NamedTuple):
    """A form of weights in a server. dtype: of torch, "auto" for that of the files. errors: of a format."""

    dtype: str = "auto"
    errors: Errors = Errors()


def served_as(name: str | None) -> ServedAs:
    """Return what a dtype or an export format brings; None: the dtype of the files. Raises ConfigError otherwise."""
    if name is None:
        return ServedAs()
    for dtype, short in NAMES.items():
        if name == short:
            return ServedAs(dtype)
    if (errors := FORMATS.get(name, FORMATS.get(name.partition(":")[0]))) is not None:
        return ServedAs(errors=errors)
    raise ConfigError(f"--format {name}: no bound is known for it. Known: {', '.join([*NAMES.values(), *FORMATS])}.")
