"""The two FP8 formats: E4M3 for activations and weights, E5M2 for gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Format = Literal["e4m3", "e5m2"]

LARGEST: Final[Mapping[str, float]] = {"e4m3": 448.0, "e5m2": 57344.0}
"""Largest finite number of each format."""

MULTIPLE: Final = 16
"""Every dimension of a product with FP8 operands is a multiple of this: cuBLASLt reads rows of 16 bytes."""

TRANSPOSING: Final = frozenset({89, 90, 120, 121})
"""Compute capabilities whose FP8 products read both operands along the summed dimension only. There the operands of
the backward products need transposed copies."""


def transposes(sm: int | None) -> bool:
    """Return whether products on this compute capability need transposed copies. References on a CPU take them too."""
    return sm is None or sm in TRANSPOSING
