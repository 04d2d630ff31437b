"""How far from the truth a right implementation may be: as far as transformers is in the same precision, or a floor."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final

from .observed import Observed

FARTHER: Final = 1.25
"""Allowed ratio of our error to that of transformers in bf16: of every output and of the loss.

Figures here and below are of 100 random models of 3 blocks (20 seeds of each of Qwen2 with key biases of standard
deviation 30 and 100, Llama with 100, Qwen3 and OLMo 2 with an eps of 1e-12): outputs at most 1.09 in fp32, 1.01 in
bf16."""

FARTHER_IN_FP32: Final = 2.0
"""The same in fp32, where errors are so small that the order of a sum decides: 1.34 on an H200 (Qwen3 with yarn,
products by cuBLASLt beside cuBLAS). The smallest error that tests plant is 100 times as large."""

FARTHER_ON_AVERAGE: Final = 1.5
"""The same of the mean over all gradients: at most 1.30 in fp32, 1.20 in bf16. Gradients of one model err together."""

FARTHER_ALONE: Final = 4.0
"""The same of a single gradient. Few tokens decide some gradients, and two errors of the same size then differ by
chance: at most 2.4 in fp32."""

FARTHER_ALONE_IN_BF16: Final = 6.0
"""The same in bf16: at most 3.9. Smaller errors of the model are found in fp32."""

NOTHING: Final = 0.9
"""A gradient that is missing has an error of 1, and this is not allowed where transformers has half of it right."""

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
    farther     allowed ratio of an output's error to theirs
    alone       allowed ratio of a single gradient's error to theirs
    """

    name: str
    theirs: Observed
    output: float
    gradient: float
    farther: float
    alone: float

    def allowed(self, theirs: float) -> float:
        """The largest error of an output whose error in transformers is `theirs`."""
        return max(self.farther * theirs, self.output)

    def allowed_gradient(self, theirs: float) -> float:
        """The same of a single gradient."""
        bound = self.alone * theirs
        return max(min(bound, NOTHING) if theirs < 0.5 else bound, self.gradient)

    def allowed_average(self, theirs: float) -> float:
        """The same of the geometric mean over all gradients."""
        return max(FARTHER_ON_AVERAGE * theirs, self.gradient)


def fp32(theirs: Observed, terms: int, tokens: int) -> Yardstick:
    """The floor is the rounding of a sum of fp32 numbers in any order: sqrt(terms) half units, at random signs.

    `terms`: of the longest sum in a product of the forward pass. Gradients of weights also sum over `tokens`.
    """
    longest = max(terms, tokens)
    floors = FP32_ROUNDING * sqrt(terms), FP32_ROUNDING * sqrt(longest)
    return Yardstick("fp32", theirs, *floors, FARTHER_IN_FP32, FARTHER_ALONE)


def bf16(theirs: Observed) -> Yardstick:
    """The floor is one rounding; sums are fp32 on both sides."""
    return Yardstick("bf16", theirs, BF16_ROUNDING, BF16_ROUNDING, FARTHER, FARTHER_ALONE_IN_BF16)
