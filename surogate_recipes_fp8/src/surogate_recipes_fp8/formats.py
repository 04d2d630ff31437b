"""The two FP8 formats: E4M3 for activations and weights, E5M2 for gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from surogate_core.api import NumericsColumn

Format = Literal["e4m3", "e5m2"]

FORMATS: Final[Mapping[str, Format]] = {"x": "e4m3", "dy": "e5m2"}
"""The format of each kind of operand."""

LARGEST: Final[Mapping[str, float]] = {"e4m3": 448.0, "e5m2": 57344.0}
"""Largest finite number of each format."""

CLIPPED_ABOVE: Final[Mapping[str, float]] = {"e4m3": 464.0, "e5m2": 61440.0 - 2.0**-8}
"""Largest fp32 number that rounds to the largest finite one, ties to even. A larger value is clipped."""

LOST_BELOW: Final[Mapping[str, float]] = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
"""Largest number that rounds to 0: half of the smallest one, since ties go to even."""

COLUMNS: Final = (
    NumericsColumn("amax", "magnitude", "largest magnitude"),
    NumericsColumn(
        "range", "share", "largest magnitude over the one that the scale maps to the format's largest number"
    ),
    NumericsColumn("clipped", "share", "elements beyond the format's largest number"),
    NumericsColumn("lost", "share", "elements other than 0 that are rounded to 0"),
    NumericsColumn("age", "steps", "optimizer steps since the magnitude was seen that made the scale; 0: this step"),
)
"""Figures of a numerics report."""

MULTIPLE: Final = 16
"""Every dimension of a product with FP8 operands is a multiple of this: cuBLASLt reads rows of 16 bytes."""

TRANSPOSING: Final = frozenset({89, 90, 120, 121})
"""Compute capabilities whose FP8 products read both operands along the summed dimension only. There the operands of
the backward products need transposed copies."""


def transposes(sm: int | None) -> bool:
    """Return whether products on this compute capability need transposed copies. References on a CPU take them too."""
    return sm is None or sm in TRANSPOSING


def multiplies_groups(sm: int | None) -> bool:
    """Return whether there are products of groups of rows, such as those of experts, on this compute capability."""
    return sm in (None, 90)
