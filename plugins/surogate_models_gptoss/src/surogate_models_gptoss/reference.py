"""The torch references of attention sinks. Sums are in fp32, of fp64 in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surogate_core.reference.rounding import accumulator


def add_sinks(
    qkv: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, **attrs: Any
) -> tuple[Tensor, Tensor]:
    """Return (out', lse'). A sink takes the share exp(sink) / (exp(sink) + exp(lse)) of a softmax."""
    sink = sinks.to(lse.dtype)[:, None]
    kept = (lse - sink).sigmoid().T[..., None]
    wide = out.to(accumulator(out.dtype)).view(len(out), len(sinks), -1)
    return (wide * kept).reshape(out.shape).to(out.dtype), torch.logaddexp(lse, sink)


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return minus the sum over tokens of the share of the sink times dout . out."""
    wide = accumulator(out.dtype)
    delta = (dout.to(wide) * out.to(wide)).view(len(out), len(sinks), -1).sum(-1).T
    return -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum(1)
