"""Torch reference of the `adamw` op."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt

from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES, store

# Philox streams of the three values of a param, combined with the param's own stream.
_MASTER, _M, _V = 0, 0x9E3779B9, 0x7F4A7C15


def adamw(
    clip_coef: Tensor,
    lr: Tensor,
    step: Tensor,
    seed: Tensor,
    *values: Tensor,
    n: int,
    copied: Sequence[int],
    copy_dtypes: Sequence[str],
    measured: Sequence[int],
    weight_decay: Sequence[float],
    streams: Sequence[int],
    beta1: float,
    beta2: float,
    epsilon: float,
    firsts: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """Apply one step to n tensors. `values` are n gradients, masters, first and second moments. `step` starts at 1.

    g = clip_coef * grad; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p *= 1 - lr wd;
    p -= lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps). Arithmetic is fp32 on the unrounded moments. bf16 masters
    and moments are stored with stochastic rounding. Nothing changes if `clip_coef` is not finite.

    Returns masters, first and second moments, then the work copies of the params `copied`, and the largest magnitudes
    of the params `measured`, fp32 []: NaN if an element is NaN. The param is the work copy, or else the master.
    """
    grads, masters, ms, vs = (values[i * n : (i + 1) * n] for i in range(4))
    new: list[list[Tensor]] = [[], [], []]
    coef, rate, t, key = float(clip_coef), float(lr), int(step), int(seed)
    correction1, correction2 = 1 - beta1**t, sqrt(1 - beta2**t)
    for i in range(n):
        if not isfinite(coef):
            results: tuple[Tensor, ...] = (masters[i], ms[i], vs[i])
        else:
            g = up(grads[i]) * coef
            m = up(ms[i]) * beta1 + g * (1 - beta1)
            v = up(vs[i]) * beta2 + g * g * (1 - beta2)
            p = up(masters[i]) * (1 - rate * weight_decay[i])
            p = p - (rate / correction1) * (m / (v.sqrt() / correction2 + epsilon))
            results = tuple(
                store(x, old.dtype, seed=key, stream=streams[i] ^ tag, step=t, first=firsts[i] if firsts else 0)
                for x, old, tag in ((p, masters[i], _MASTER), (m, ms[i], _M), (v, vs[i], _V))
            )
        for column, result in zip(new, results, strict=True):
            column.append(result)
    copies = {i: new[0][i].to(TORCH_DTYPES[dtype]) for i, dtype in zip(copied, copy_dtypes, strict=True)}
    amaxes = [copies.get(i, new[0][i]).abs().max().float() for i in measured]
    return (*new[0], *new[1], *new[2], *copies.values(), *amaxes)
