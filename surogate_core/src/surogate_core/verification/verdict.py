"""How far is too far, and which layer went wrong first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from .observed import Observed

FP32_BOUND = 1e-5
"""Relative distance of fp32 from fp32 over four blocks, which all families keep (tests/models). Sums of K products in
another order differ by about sqrt(K) x 6e-8; those of blocks are independent and grow by the root of their number."""

FARTHER = 1.25
"""Ours may be so many times as far from the truth as transformers in bf16: outputs, the loss, gradients on average."""

FARTHER_ALONE = 2.5
"""The same of a single gradient, where few tokens decide and so chance does: of 1,100 gradients of small models of
three families the errors were 0.91 times those of transformers on average, 1.8 times at most."""

BF16_ROUNDING = 2.0**-9
"""Half the distance of neighbouring bf16 numbers: who is nearer than that has rounded once."""


@dataclass(frozen=True)
class Row:
    """A tensor's distance to transformers in fp32, relative to its norm; kind "average": that of all gradients.

    layer: -1 outside of layers. theirs: that of transformers in bf16; None where ours computes in fp32. cosine: of
    gradients.
    """

    name: str
    kind: Literal["output", "loss", "gradient", "average"]
    layer: int
    error: float
    theirs: float | None
    allowed: float
    cosine: float | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # not so for NaN


@dataclass(frozen=True)
class Verdict:
    """rows: outputs in the order of the forward pass, the loss, gradients in the order of the layers, their average."""

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


def compare(
    ours: Observed, truth: Observed, half: Observed | None, layers: Mapping[str, int], n_layers: int
) -> Verdict:
    """`layers`: of each gradient, by name, in the order to show; -1 outside. half: transformers in bf16."""
    exact = FP32_BOUND * sqrt(max(1, n_layers / 4))

    def allowed(theirs: float | None, farther: float = FARTHER) -> float:
        return exact if theirs is None else max(farther * theirs, BF16_ROUNDING)

    def rows() -> Iterator[Row]:
        for name, want in truth.states.items():
            theirs = None if half is None else distance(half.states[name], want)
            layer = int(name.split()[1]) if name.startswith("block ") else -1
            yield Row(name, "output", layer, distance(ours.states.get(name), want), theirs, allowed(theirs))
        theirs = None if half is None else abs(half.loss - truth.loss) / abs(truth.loss)
        yield Row("loss", "loss", -1, abs(ours.loss - truth.loss) / abs(truth.loss), theirs, allowed(theirs))
        for name, layer in layers.items():
            want, got = truth.gradients[name], ours.gradients[name]
            theirs = None if half is None else distance(half.gradients[name], want)
            cosine = float((got * want).sum(dtype=torch.float64)) / max(norm(got) * norm(want), 1e-300)
            yield Row(name, "gradient", layer, distance(got, want), theirs, allowed(theirs, FARTHER_ALONE), cosine)

    found = list(rows())
    if half is not None:
        pairs = [(row.error, row.theirs) for row in found if row.kind == "gradient" and row.theirs is not None]
        mean, reference = (sum(errors) / len(pairs) for errors in zip(*pairs, strict=True))
        found.append(Row("average of all gradients", "average", -1, mean, reference, allowed(reference)))
    return Verdict(tuple(found), ours.loss, truth.loss)


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
