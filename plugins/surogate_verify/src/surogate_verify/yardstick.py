"""The largest error that a correct implementation may have: a multiple of the error of transformers, or a floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isinf, isnan, nan, sqrt
from statistics import median
from typing import Final

from .observed import Observed

FARTHER: Final = 1.25
"""Allowed ratio of our error to the error of transformers in bf16, for every output and the loss.

Measured here and below on 100 random models of 3 blocks (20 seeds each of Qwen2 with key biases of standard deviation
30 and 100, Llama with 100, Qwen3 and OLMo 2 with an eps of 1e-12): outputs at most 1.09 in fp32, 1.01 in bf16."""

FARTHER_IN_FP32: Final = 2.0
"""The same in fp32, where errors are so small that the order of a sum matters: 1.34 on an H200 (Qwen3 with yarn,
products by cuBLASLt against cuBLAS). The smallest error that tests plant is 100 times as large."""

FARTHER_QUANTIZED: Final = 1.5
"""The same where both round the operands of products further, ours as the recipe, theirs at random: at most 1.14 in 104
random models of 13 families (gradients 2.44, their mean 1.08), 1.35 with a channel 60 times as large as others."""

FARTHER_ON_AVERAGE: Final = 1.5
"""The same for the mean over all gradients: at most 1.30 in fp32, 1.20 in bf16. Gradients of one model err together."""

FARTHER_ALONE: Final = 4.0
"""The same for a single gradient: at most 2.4 in fp32. Some gradients depend on few tokens, and their errors differ by
chance."""

FARTHER_ALONE_IN_BF16: Final = 6.0
"""The same for a single gradient in bf16: at most 3.9. Smaller errors of the model are found in fp32."""

DRAWS: Final = 8
"""Draws of transformers' rounding that decide before a run is called wrong. One is enough for a run that is within
its bounds, and two for an error that is FAR above them. Where products are quantized, the one that is drawn decides,
and in bf16 for all but gradients of FEW numbers.

The hardest case is an error that is one normal number. That of a right model is called wrong with a probability of
4e-4 where the allowed ratio is 2, 2e-5 at 4 and 6 (a million simulations each). With one draw it would be 0.30, 0.16
and 0.11. Errors of many terms hardly differ between draws."""

FEW: Final = 64
"""Numbers of a gradient of which further draws in bf16 count. There a draw rounds as far again as bf16 does, so it
would widen the bounds of all: RoPE that is off by one was within them. Errors of more numbers hardly differ by
chance."""

FAR: Final = 30.0
"""An error that is this many times its bound needs no further draw."""

HALF: Final = 0.5
NOTHING: Final = 0.9
"""Upper bound for a gradient of which transformers gets at least HALF right in every draw. A missing gradient has an
error of 1."""

FP32_ROUNDING: Final = 2.0**-24
BF16_ROUNDING: Final = 2.0**-9
"""Relative rounding errors: at most half the distance of neighbouring numbers."""


@dataclass(frozen=True)
class Yardstick:
    """The errors that ours are compared with.

    name          the precision, as a heading
    transformers  results of transformers in that precision: one or several draws of its rounding
    output        error of outputs and the loss that is always allowed, relative to the norm of the truth
    gradient      the same for gradients
    farther       allowed ratio of our error of an output to that of transformers
    alone         allowed ratio of our error of a single gradient to that of transformers
    drawn         numbers of a gradient, up to which all draws count; of others the first one does. None: all always do
    """

    name: str
    transformers: Sequence[Observed]
    output: float
    gradient: float
    farther: float
    alone: float
    drawn: int | None = None

    def counts_draws(self, numbers: int | None) -> bool:
        """Return whether all draws count for an error of so many numbers; None: of more than any gradient has."""
        return self.drawn is None or (numbers is not None and numbers <= self.drawn)

    def error(self, of: Callable[[Observed], float], numbers: int | None = None) -> float:
        """Return the error that a draw of transformers' rounding may have, from that of each draw that counts.

        It is the largest, times how far that is above the median. So it is wider where draws differ: an error of few
        terms may be small by chance in any of them. Of tensors with many, all draws agree. At most HALF, if all draws
        are. NaN if one is.
        """
        draws = self.transformers if self.counts_draws(numbers) else self.transformers[:1]
        errors = [of(draw) for draw in draws]
        if any(map(isnan, errors)):
            return nan
        largest, middle = max(errors), median(errors)
        if middle == 0 or isinf(largest):
            return largest
        wider = largest * largest / middle
        return min(wider, HALF) if largest <= HALF else wider

    def allowed(self, reference: float) -> float:
        """Return the largest allowed error of an output whose error in transformers is `reference`."""
        return max(self.farther * reference, self.output)

    def allowed_gradient(self, reference: float) -> float:
        """Return the same for a single gradient."""
        bound = self.alone * reference
        return max(min(bound, NOTHING) if reference <= HALF else bound, self.gradient)

    def allowed_average(self, reference: float) -> float:
        """Return the same for the geometric mean over all gradients."""
        return max(FARTHER_ON_AVERAGE * reference, self.gradient)


def fp32(transformers: Sequence[Observed], terms: int, tokens: int) -> Yardstick:
    """Return the yardstick for fp32. Its floor is the rounding error of a sum of fp32 numbers in any order.

    That is sqrt(terms) times half a unit, with random signs. `terms` is the length of the longest sum in a product of
    the forward pass. Gradients of weights also sum over `tokens`.
    """
    longest = max(terms, tokens)
    floors = FP32_ROUNDING * sqrt(terms), FP32_ROUNDING * sqrt(longest)
    return Yardstick("fp32", transformers, *floors, FARTHER_IN_FP32, FARTHER_ALONE)


def bf16(transformers: Sequence[Observed], product_error: float) -> Yardstick:
    """Return the yardstick for bf16, in which products of `transformers` are off by `product_error` besides.

    Its floor is one rounding, because sums are fp32 on both sides.
    """
    name, farther, alone = "bf16", FARTHER, FARTHER_ALONE_IN_BF16
    if product_error:
        name, farther, alone = "bf16 quantized", FARTHER_QUANTIZED, FARTHER_ALONE
    return Yardstick(name, transformers, BF16_ROUNDING, BF16_ROUNDING, farther, alone, FEW)
