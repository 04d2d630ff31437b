"""How far from the truth a right implementation may be: as far as transformers is in the same precision, or a floor."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final

from .observed import Observed

FARTHER: Final = 1.25
"""Allowed ratio of our error to that of transformers: of every output, of the loss and of gradients on average.

Measured on small models of three families, 12 of them, with key biases of standard deviation up to 100: outputs at most
1.05 in fp32 and 0.90 in bf16, gradients on average 1.00 to 1.04 and 0.76 to 0.78."""

FARTHER_ALONE: Final = 2.5
"""The same of a single gradient. Few tokens decide some gradients, and two errors of the same size then differ by
chance: at most 1.6 in fp32 in the same models."""

FARTHER_IN_BF16: Final = 4.0
"""The same in bf16, where the run's other precision shows smaller errors than this one can: at most 2.7."""

FP32_ROUNDING: Final = 2.0**-24
BF16_ROUNDING: Final = 2.0**-9
"""Half the distance of neighbouring numbers, at most, relative to them."""


@dataclass(frozen=True)
class Yardstick:
    """What our errors are measured by.

    name        the precision, as a heading
    theirs      results of transformers in that precision
    output      error that is allowed whatever theirs is: of outputs and the loss, relative to the truth's norm
    gradient    the same of gradients
    alone       allowed ratio of a single gradient's error to theirs
    """

    name: str
    theirs: Observed
    output: float
    gradient: float
    alone: float

    def allowed(self, theirs: float) -> float:
        """The largest error of an output whose error in transformers is `theirs`."""
        return max(FARTHER * theirs, self.output)

    def allowed_gradient(self, theirs: float) -> float:
        """The same of a single gradient."""
        return max(self.alone * theirs, self.gradient)

    def allowed_average(self, theirs: float) -> float:
        """The same of the geometric mean over all gradients."""
        return max(FARTHER * theirs, self.gradient)


def fp32(theirs: Observed, terms: int, tokens: int) -> Yardstick:
    """The floor is the rounding of a sum of fp32 numbers in any order: sqrt(terms) half units, at random signs.

    `terms`: of the longest sum in a product of the forward pass. Gradients of weights also sum over `tokens`.
    """
    longest = max(terms, tokens)
    return Yardstick("fp32", theirs, FP32_ROUNDING * sqrt(terms), FP32_ROUNDING * sqrt(longest), FARTHER_ALONE)


def bf16(theirs: Observed) -> Yardstick:
    """The floor is one rounding; sums are fp32 on both sides."""
    return Yardstick("bf16", theirs, BF16_ROUNDING, BF16_ROUNDING, FARTHER_IN_BF16)
