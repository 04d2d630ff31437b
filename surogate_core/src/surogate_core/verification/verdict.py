"""Which results are too far from the truth, and which layer went wrong first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Literal

import torch
from torch import Tensor

from .observed import LOGITS, Observed
from .yardstick import Yardstick


@dataclass(frozen=True)
class Row:
    """A tensor's distance to transformers in float64, relative to its norm; kind "average": that of all gradients.

    layer: -1 outside of layers. theirs: the error of transformers in the precision of the yardstick. cosine: of
    gradients.
    """

    name: str
    kind: Literal["output", "loss", "gradient", "average"]
    layer: int
    error: float
    theirs: float
    allowed: float
    cosine: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # not so for NaN


@dataclass(frozen=True)
class Verdict:
    """precision: of the yardstick. rows: outputs in the order of the forward pass, the loss, gradients in the order of
    the layers, their average."""

    precision: str
    rows: tuple[Row, ...]
    loss: float
    true_loss: float

    @property
    def passed(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def first_wrong(self) -> Row | None:
        """Where to look: the first wrong output of the forward pass, else the wrong gradient that is computed first."""
        forward = [row for row in self.rows if row.kind in ("output", "loss") and not row.ok]
        backward = [row for row in self.rows if row.kind == "gradient" and not row.ok]
        average = [row for row in self.rows if row.kind == "average" and not row.ok]
        return next(iter(forward or [*reversed(backward), *average]), None)


def compare(ours: Observed, truth: Observed, yardstick: Yardstick, layers: Mapping[str, int]) -> Verdict:
    """`layers`: of each gradient, by name, in the order to show; -1 outside."""
    outputs = list(_outputs(ours, truth, yardstick))
    gradients = list(_gradients(ours, truth, yardstick, layers))
    rows = (*outputs, _loss(ours, truth, yardstick), *gradients, _average(gradients, yardstick))
    return Verdict(yardstick.name, rows, ours.loss, truth.loss)


def _outputs(ours: Observed, truth: Observed, yardstick: Yardstick) -> Iterator[Row]:
    for name, want in truth.states.items():
        theirs = distance(yardstick.theirs.states[name], want)
        layer = int(name.split()[1]) if name.startswith("block ") else -1
        yield Row(name, "output", layer, distance(ours.states.get(name), want), theirs, yardstick.allowed(theirs))


def _loss(ours: Observed, truth: Observed, yardstick: Yardstick) -> Row:
    """Relative to the loss. A single number may be right by chance, so that what transformers' logits are off counts
    where it is more: the loss of a token is off by about as much as its logits."""
    of_logits = norm(yardstick.theirs.states[LOGITS] - truth.states[LOGITS]) / truth.states[LOGITS].numel() ** 0.5
    theirs = abs(yardstick.theirs.loss - truth.loss) / abs(truth.loss)
    allowed = yardstick.allowed(max(theirs, of_logits / abs(truth.loss)))
    return Row("loss", "loss", -1, abs(ours.loss - truth.loss) / abs(truth.loss), theirs, allowed)


def _gradients(ours: Observed, truth: Observed, yardstick: Yardstick, layers: Mapping[str, int]) -> Iterator[Row]:
    for name, layer in layers.items():
        want, got = truth.gradients[name], ours.gradients[name]
        theirs = distance(yardstick.theirs.gradients[name], want)
        cosine = float((got * want).sum(dtype=torch.float64)) / max(norm(got) * norm(want), 1e-300)
        allowed = yardstick.allowed_gradient(theirs)
        yield Row(name, "gradient", layer, distance(got, want), theirs, allowed, cosine)


def _average(gradients: Sequence[Row], yardstick: Yardstick) -> Row:
    """Geometric means, so that a gradient that is hard to compute does not hide the others. Errors below the
    yardstick's floor count as the floor."""

    def mean(errors: Sequence[float]) -> float:
        return exp(sum(log(max(error, yardstick.gradient)) for error in errors) / len(errors))

    ours, theirs = mean([row.error for row in gradients]), mean([row.theirs for row in gradients])
    return Row("average of all gradients", "average", -1, ours, theirs, yardstick.allowed_average(theirs))


def distance(got: Tensor | None, want: Tensor) -> float:
    """|got - want| / |want|; infinite where there is nothing, another shape, or something that should be nothing."""
    if got is None or got.shape != want.shape:
        return float("inf")
    off, size = norm(got - want), norm(want)
    if size == 0:
        return 0.0 if off == 0 else float("inf")
    return off / size


def norm(tensor: Tensor) -> float:
    """The 2-norm, summed in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
