"""The gate of experts, of which SwiGLU is a form, and its gradients, in fp32.

    gate * sigmoid(alpha * gate) * (up + offset)

limit        the gate is at most it, up lies between -limit and limit; 0: without limit
interleaved  gate and up alternate in the columns of gate_up; else the gates are its first half
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .ops import up


def experts_gate(
    gate_up: Tensor, *, alpha: float = 1.0, limit: float = 0.0, offset: float = 0.0, interleaved: bool = False
) -> Tensor:
    """[R, 2 F] -> [R, F]."""
    opens, value = _clamped(*_columns(gate_up, interleaved), limit)
    opened = F.silu(opens) if alpha == 1 else opens * torch.sigmoid(alpha * opens)
    return opened * (value + offset if offset else value)


def experts_gate_bwd(
    d: Tensor,
    gate_up: Tensor,
    *,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of gate_up by that of the gate, d [R, F]; then the two factors of the gate. A clamped element has
    no gradient.
    """
    free_opens, free_value = _columns(gate_up, interleaved)
    opens, value = _clamped(free_opens, free_value, limit)
    value = value + offset if offset else value
    sigmoid = torch.sigmoid(opens if alpha == 1 else alpha * opens)
    opened, slope = opens * sigmoid, opens * (1 - sigmoid)
    d_opens, d_value = d * value * sigmoid * (1 + (slope if alpha == 1 else alpha * slope)), d * opened
    if limit:
        d_opens, d_value = d_opens * (free_opens <= limit), d_value * (free_value.abs() <= limit)
    both = (d_opens, d_value)
    return torch.stack(both, dim=2).flatten(1) if interleaved else torch.cat(both, dim=1), opened, value


def _columns(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    opens, value = up(gate_up).unflatten(1, (-1, 2)).unbind(2) if interleaved else up(gate_up).chunk(2, dim=1)
    return opens, value


def _clamped(opens: Tensor, value: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return (opens.clamp(max=limit), value.clamp(-limit, limit)) if limit else (opens, value)
