"""The results that are too far from the truth, and the first wrong layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Literal

import torch
from torch import Tensor

from .observed import LOGIT_POSITIONS, LOGITS, Observed
from .yardstick import Yardstick

ZERO = 1e-10
"""Share of the largest gradient of its layer up to which a gradient in float64 is zero in truth, as those of queries
and keys are with a window of one token. What is computed of it is rounding, and compared with that largest gradient."""


@dataclass(frozen=True)
class Row:
    """The distance of a tensor to transformers in float64, relative to its norm. Kind "average" is that of all
    gradients.

    layer               -1 outside of layers
    error               of our tensor
    transformers_error  of transformers in the precision of the yardstick
    cosine              of gradients: the cosine of ours and the truth
    drawn               whether further draws of transformers' rounding may widen what is allowed
    """

    name: str
    kind: Literal["output", "loss", "gradient", "average"]
    layer: int
    error: float
    transformers_error: float
    allowed: float
    cosine: float | None = None
    drawn: bool = True

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # False for NaN


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    precision  of the yardstick
    rows       outputs in the order of the forward pass, the loss, gradients in the order of the layers, their average
    loss       ours
    true_loss  that of transformers in float64
    not_compared
               outputs that only one side has
    """

    precision: str
    rows: tuple[Row, ...]
    loss: float
    true_loss: float
    not_compared: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def first_wrong(self) -> Row | None:
        """The first wrong output of the forward pass; if there is none, the wrong gradient that is computed first."""
        forward = [row for row in self.rows if row.kind in ("output", "loss") and not row.ok]
        backward = [row for row in self.rows if row.kind == "gradient" and not row.ok]
        average = [row for row in self.rows if row.kind == "average" and not row.ok]
        return next(iter(forward or [*reversed(backward), *average]), None)


def compare(ours: Observed, truth: Observed, yardstick: Yardstick, layers: Mapping[str, int]) -> Verdict:
    """Compare our results with the truth. `layers` has the layer of each gradient by name, -1 outside of layers."""
    outputs = list(_outputs(ours, truth, yardstick))
    gradients = list(_gradients(ours, truth, yardstick, layers))
    rows = (*outputs, _loss(ours, truth, yardstick), *gradients, _average(gradients, yardstick))
    missing = tuple(sorted(ours.states.keys() ^ truth.states.keys()))
    return Verdict(yardstick.name, rows, ours.loss, truth.loss, missing)


def _outputs(ours: Observed, truth: Observed, yardstick: Yardstick) -> Iterator[Row]:
    reference = 0.0
    for name, want in ((name, want) for name, want in truth.states.items() if name in ours.states):

        def off(of: Observed, name: str = name, want: Tensor = want) -> float:
            return distance(of.states[name], want)

        before, reference = reference, yardstick.error(off)
        layer = int(name.split()[1]) if name.startswith("block ") else -1
        few = want.numel() <= LOGIT_POSITIONS  # scores may be right by chance, what they are computed from is not
        allowed = yardstick.allowed_gradient(max(reference, before)) if few else yardstick.allowed(reference)
        off_by, drawn = distance(ours.states[name], want), yardstick.counts_draws(None)
        yield Row(name, "output", layer, off_by, reference, allowed, drawn=drawn)
    if ours.choices:
        error = lost(truth.taken, truth.values)
        reference = yardstick.error(lambda of: lost(of.choices, truth.values), 0)  # of the few that are nearly alike
        yield Row("choices", "output", -1, error, reference, yardstick.allowed(reference))


def _unmasked(values: Tensor) -> Tensor:
    """Return values with the lowest finite one of each row where a router has masked them with -inf."""
    masked = values == -inf
    return torch.where(masked, values.masked_fill(masked, inf).amin(-1, keepdim=True), values)


def lost(choices: Sequence[Tensor], values: Sequence[Tensor]) -> float:
    """Return the norm of what a router's choices lose, of each token, over that of the best: the most, or NaN."""
    shares = []
    for chosen, of in zip(choices, map(_unmasked, values), strict=True):
        best = of.topk(chosen.shape[-1]).values.sum(-1)
        shares.append(norm(best - of.gather(-1, chosen.long()).sum(-1)) / norm(best))
    return float(torch.tensor(shares, dtype=torch.float64).max())


def _loss(ours: Observed, truth: Observed, yardstick: Yardstick) -> Row:
    """Return the error relative to the loss.

    The loss of transformers is one number and may be right by chance. So the error of its logits counts if it is
    larger: the loss of a token is off by about as much as its logits.
    """
    scores = truth.states[LOGITS]
    of_logits = yardstick.error(lambda of: norm(of.states[LOGITS] - scores)) / scores.numel() ** 0.5
    reference = yardstick.error(lambda of: abs(of.loss - truth.loss)) / abs(truth.loss)
    rule = yardstick.allowed_gradient if truth.states[LOGITS].numel() <= LOGIT_POSITIONS else yardstick.allowed
    allowed = rule(max(reference, of_logits / abs(truth.loss)))
    off_by, drawn = abs(ours.loss - truth.loss) / abs(truth.loss), yardstick.counts_draws(None)
    return Row("loss", "loss", -1, off_by, reference, allowed, drawn=drawn)


def _gradients(ours: Observed, truth: Observed, yardstick: Yardstick, layers: Mapping[str, int]) -> Iterator[Row]:
    scales: dict[int, float] = {}
    for name, layer in layers.items():
        scales[layer] = max(scales.get(layer, 0.0), norm(truth.gradients[name]))
    for name, layer in layers.items():
        want, got, scale = truth.gradients[name], ours.gradients[name], scales[layer]
        is_zero = norm(want) <= ZERO * scale

        def error(of: Observed, name: str = name, want: Tensor = want, zero: float = scale * is_zero) -> float:
            return norm(of.gradients[name] - want) / zero if zero else distance(of.gradients[name], want)

        reference, drawn = yardstick.error(error, want.numel()), yardstick.counts_draws(want.numel())
        cosine = float((got * want).sum(dtype=torch.float64)) / max(norm(got) * norm(want), 1e-300)
        allowed = yardstick.allowed_gradient(reference)
        yield Row(name, "gradient", layer, error(ours), reference, allowed, None if is_zero else cosine, drawn)


def _average(gradients: Sequence[Row], yardstick: Yardstick) -> Row:
    """Return geometric means, in which a gradient that is hard to compute does not hide the others.

    Errors below the floor of the yardstick count as the floor.
    """

    def mean(errors: Sequence[float]) -> float:
        return exp(sum(log(max(error, yardstick.gradient)) for error in errors) / len(errors))

    ours = mean([row.error for row in gradients])
    reference = mean([row.transformers_error for row in gradients])
    return Row("average of all gradients", "average", -1, ours, reference, yardstick.allowed_average(reference))


def distance(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want|. Infinite if `got` has another shape, or if only `want` is zero."""
    if got.shape != want.shape:
        return float("inf")
    off, size = norm(got - want), norm(want)
    if size == 0:
        return 0.0 if off == 0 else float("inf")
    return off / size


def norm(tensor: Tensor) -> float:
    """Return the 2-norm, summed in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
