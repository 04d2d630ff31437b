"""Torch reference of the `adamw_8bit` op."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import isfinite, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES, store

from .codes import BLOCK, ZERO, code_map, rounded, thresholds


def adamw_8bit(
    clip_coef: Tensor,
    lr: Tensor,
    step: Tensor,
    seed: Tensor,
    *values: Tensor,
    n: int,
    quantized: Sequence[int],
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
    """Apply one step to n tensors. `step` starts at 1.

    `values` are n gradients, masters, first and second moments; then, for the tensors `quantized`, whose moments are
    codes (uint8), the scales of the first and those of the second moments, fp32 [blocks].

    g = clip_coef * grad; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p *= 1 - lr wd;
    p -= lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps sqrt(1 - b2^t)), with m and v before they are quantized. b1
    and b2 are rounded to fp32, all arithmetic on tensors is fp32. bf16 masters are stored with stochastic rounding.
    Nothing changes if `clip_coef` is not finite.

    Returns masters, first and second moments, both scales, then the work copies of the params `copied`, and the largest
    magnitudes of the params `measured`, fp32 []: NaN if an element is NaN. The param is the work copy, or else the
    master.
    """
    grads, masters, ms, vs = (values[i * n : (i + 1) * n] for i in range(4))
    scales = values[4 * n :]
    m_scales = dict(zip(quantized, scales[: len(quantized)], strict=True))
    v_scales = dict(zip(quantized, scales[len(quantized) :], strict=True))
    new_masters, new_ms, new_vs = list(masters), list(ms), list(vs)
    coef, rate, t = float(clip_coef), float(lr), int(step)
    if isfinite(coef):
        b1, b2 = rounded(beta1), rounded(beta2)
        correction2 = sqrt(1 - b2**t)
        size = rounded(rate * correction2 / (1 - b1**t))
        for i in range(n):
            m, v = _decoded(ms[i], m_scales.get(i), True), _decoded(vs[i], v_scales.get(i), False)
            g = up(grads[i]) * coef
            m = m * b1 + g * (1 - b1)
            v = v * b2 + g * (1 - b2) * g
            p = up(masters[i]) * (1 - rate * weight_decay[i])
            p = p - (m / (v.sqrt() + epsilon * correction2)) * size
            first = firsts[i] if firsts else 0
            new_masters[i] = store(p, masters[i].dtype, seed=int(seed), stream=streams[i], step=t, first=first)
            if i in m_scales:
                new_ms[i], m_scales[i] = encoded(m, signed=True)
                new_vs[i], v_scales[i] = encoded(v, signed=False)
            else:
                new_ms[i], new_vs[i] = m, v
    copies = {i: new_masters[i].to(TORCH_DTYPES[dtype]) for i, dtype in zip(copied, copy_dtypes, strict=True)}
    amaxes = [copies.get(i, new_masters[i]).abs().max().float() for i in measured]
    return (*new_masters, *new_ms, *new_vs, *m_scales.values(), *v_scales.values(), *copies.values(), *amaxes)


def encoded(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize a moment. Return its codes (uint8, in the shape of `x`) and its scales, fp32 [blocks].

    The scale of a block is its largest magnitude. A code is the nearest to x / scale; halfway between two, the even
    one. A number that is not 0 never gets the code of 0, but the next one of its sign: a second moment of 0 below a
    first moment that is not 0 would make the next update as large as 1 / eps.
    """
    blocks = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    ratio = (blocks / scales[:, None]).nan_to_num(nan=0.0)  # a block of zeros
    codes = torch.bucketize(ratio, _thresholds(signed), right=True)
    zero = ZERO if signed else 0
    codes += (codes == zero) * blocks.nan_to_num(nan=0.0).sign().long()
    return codes.to(torch.uint8).flatten()[: x.numel()].view(x.shape), scales


def _decoded(moment: Tensor, scales: Tensor | None, signed: bool) -> Tensor:
    """Return a moment in fp32. `scales` is None if it is stored so."""
    if scales is None:
        return moment
    return _numbers(signed)[moment.long()] * scales.repeat_interleave(BLOCK)[: moment.numel()].view(moment.shape)


@cache
def _thresholds(signed: bool) -> Tensor:
    return torch.tensor(thresholds(signed), dtype=torch.float32)


@cache
def _numbers(signed: bool) -> Tensor:
    return torch.tensor(code_map(signed), dtype=torch.float32)
