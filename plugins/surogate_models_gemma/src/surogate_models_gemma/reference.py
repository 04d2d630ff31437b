"""Torch references of the ops in `ops.py`. They compute in fp32 (fp64 for fp64 inputs) and round each output once."""

from __future__ import annotations

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.ops import up

_K, _A = (2 / pi) ** 0.5, 0.044715


def scale(x: Tensor, *, factor: float) -> Tensor:
    """x * factor."""
    return (up(x) * factor).to(x.dtype)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu(g) = g (1 + tanh(k (g + a g^3))) / 2 with k = sqrt(2 / pi), a = 0.044715."""
    gate, value = up(gate_up).chunk(2, dim=1)
    return (F.gelu(gate, approximate="tanh") * value).to(gate_up.dtype)


def geglu_bwd(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradients of gate and up."""
    gate, value = up(gate_up).chunk(2, dim=1)
    t = torch.tanh(_K * (gate + _A * gate**3))
    half = (1 + t) / 2
    slope = half + gate * (1 - t.square()) * _K * (1 + 3 * _A * gate.square()) / 2
    return torch.cat((up(dy) * value * slope, up(dy) * gate * half), dim=1).to(gate_up.dtype)
