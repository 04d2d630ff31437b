"""Torch references of the FP8 ops, exact to the bit in what they quantize.

A scale is fp32 [2]: (decode, encode). A value is quantized as `round(x * encode)` and read as `q * decode`. An amax is
fp32 [2]: the largest finite magnitude, and 1 if the tensor held NaN or inf. A scale whose `encode` is 0 belongs to a
quantizer that has seen no value yet. It counts as 1.

`scaling` says where an op takes its scale from, and which inputs it has after its own:

delayed   scale, amax: quantizes by `scale` and raises `amax`
given     scale: quantizes by `scale`
current   amax or nothing: quantizes by the scale of this very tensor, which is the last output, and raises `amax`
fallback  scale: quantizes by `scale`, or, if it belongs to a quantizer that has seen no value yet, like `current`; the
          scale that was used is the last output

A scale that an op computes has a decode factor of NaN if the tensor is not finite: infinities saturate, and products
that read them must not look finite.
"""

from __future__ import annotations

from itertools import pairwise
from math import pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference import e2m1
from surogate_core.reference import ops as standard
from surogate_core.reference.gates import experts_gate, experts_gate_bwd
from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.reference.stored_matrix import e5m2_copy

from .formats import CLIPPED_ABOVE, LARGEST, LOST_BELOW

_NAN = 0x7F
"""The code of NaN, whatever its sign."""
_FP32_MAX = torch.finfo(torch.float32).max


def encode(x: Tensor, factor: Tensor, dtype: str) -> Tensor:
    """Return x * factor rounded to nearest even; larger magnitudes become the largest finite one."""
    largest = LARGEST[dtype]
    wide = x.float() * factor
    quantized = wide.clamp(-largest, largest).to(TORCH_DTYPES[dtype])
    return quantized.view(torch.uint8).masked_fill(wide.isnan(), _NAN).view(TORCH_DTYPES[dtype])


def fp8_amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of x, and 1 if any element is not finite."""
    finite = x.isfinite()
    return torch.stack([x.float().abs().where(finite, 0).max(), (~finite).any().float()])


def scale_of(amax: Tensor, maximum: float) -> Tensor:
    """(decode, encode) that map the magnitude `amax`, a scalar, to `maximum`; (1, 1) for 0."""
    factor = torch.where(amax > 0, (torch.tensor(maximum) / amax).clamp(max=_FP32_MAX), 1.0)
    return torch.stack([1.0 / factor, factor])


def fp8_scales(*amax: Tensor, maximum: float) -> tuple[Tensor, ...]:
    """The scale of each amax, a scalar or fp32 [2]."""
    return tuple(scale_of(a.reshape(-1)[0], maximum) for a in amax)


class _Quantizer:
    """Quantizes one tensor. `scale` is the one used; `outs` and `changed` end the results of an op."""

    def __init__(self, value: Tensor, scaling: str, given: tuple[Tensor, ...], dtype: str) -> None:
        found, maximum = fp8_amax(value), LARGEST[dtype]
        is_new = scaling == "current" or (scaling == "fallback" and given[0][1] == 0)
        self.scale = scale_of(found[0], maximum) if is_new else given[0]
        if is_new and found[1] != 0:
            self.scale[0] = torch.nan
        self.q = encode(value, torch.where(self.scale[1] == 0, 1.0, self.scale[1]), dtype)
        self.outs = (self.scale.clone(),) if scaling in ("current", "fallback") else ()
        amax = given[1:] if scaling == "delayed" else given if scaling == "current" else ()
        self.changed = tuple(torch.maximum(a, found) for a in amax)

    def copies(self, transposed: bool) -> tuple[Tensor, ...]:
        return (self.q, self.q.T.contiguous()) if transposed else (self.q,)


def fp8_quantize(
    x: Tensor, *given: Tensor, dtype: str, scaling: str, transposed: bool = False, column_sums: bool = False
) -> tuple[Tensor, ...]:
    """The FP8 codes of x, of its transpose if `transposed`, and what the scaling returns."""
    found = _Quantizer(x, scaling, given, dtype)
    sums = (up(x).sum(0),) if column_sums else ()
    return *found.copies(transposed), *sums, *found.outs, *found.changed


def fp8_quantize_exact(w: Tensor, *, transposed: bool) -> tuple[Tensor, ...]:
    """The weight in E5M2, its transpose if `transposed`, and a scale that is a power of two.

    Weight formats make these copies from what they store (`OpDef.copies_to`), so there is no kernel.
    """
    copy, scale = e5m2_copy(w, fp8_amax(w)[None], transposed=False)
    return copy, *((copy.T.contiguous(),) if transposed else ()), scale


def fp8_inexact(codes: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """Count the elements of a weight, E2M1 times powers of two, that its copy by `fp8_quantize_exact` does not hold.

    codes [R, K / 2] and scales [R, K / 32], E8M0, as MXFP4 stores them; amax [matrices, 2] of the weight. -> int32 [].
    """
    largest = amax[:, 0].max()
    exponent = torch.frexp(largest).exponent.int() - 1
    encode = torch.where(largest > 0, (15 - exponent).clamp(max=127), 0)
    unit = scales.int() - 127 + encode + 15  # of a block: its magnitudes, times 2, are multiples of 2^(unit - 16)
    twos = torch.tensor([511, 0, 1, 0, 2, 1, 3, 2])[(e2m1.unpacked(codes) & 7).long()]  # in 0, 1, 2, 3, 4, ...
    return (twos.view(*scales.shape, -1) < -unit[..., None]).sum().int()


def fp8_transpose(q: Tensor) -> Tensor:
    """The transpose of codes."""
    return q.T.contiguous()


def fp8_rmsnorm(
    x: Tensor,
    w: Tensor,
    *given: Tensor,
    eps: float,
    dtype: str,
    scaling: str,
    transposed: bool = False,
    wide: bool = False,
) -> tuple[Tensor, ...]:
    """Quantizes `rmsnorm`."""
    norm, rstd = standard.rmsnorm(x, w, eps=eps)
    found = _Quantizer(norm, scaling, given, dtype)
    return *found.copies(transposed), *((norm,) if wide else ()), rstd, *found.outs, *found.changed


def fp8_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    *given: Tensor,
    eps: float,
    dtype: str,
    scaling: str,
    transposed: bool = False,
    wide: bool = False,
) -> tuple[Tensor, ...]:
    """Quantizes the norm of `add_rmsnorm`."""
    norm, rstd, total = standard.add_rmsnorm(x, residual, w, eps=eps)
    found = _Quantizer(norm, scaling, given, dtype)
    return *found.copies(transposed), *((norm,) if wide else ()), rstd, total, *found.outs, *found.changed


def fp8_swiglu(gate_up: Tensor, *given: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    """Quantizes `swiglu`."""
    return _gated(standard.swiglu(gate_up), given, **attrs)


def fp8_geglu(gate_up: Tensor, *given: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    """Quantizes `geglu`."""
    return _gated(_geglu(gate_up), given, **attrs)


def fp8_swiglu_bwd(dy: Tensor, gate_up: Tensor, *given: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    """Quantizes `swiglu_bwd`. With `hidden`, its last own input is the scale of swiglu(gate_up), of which the
    transposed copy in the format `hidden` is made again.
    """
    return _gated_bwd(standard.swiglu_bwd(dy, gate_up), standard.swiglu(gate_up), given, **attrs)


def fp8_geglu_bwd(dy: Tensor, gate_up: Tensor, *given: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    """Quantizes `geglu_bwd`, as `fp8_swiglu_bwd` does."""
    return _gated_bwd(_geglu_bwd(dy, gate_up), _geglu(gate_up), given, **attrs)


def fp8_weighted_swiglu(
    gate_up: Tensor,
    weights: Tensor,
    order: Tensor,
    *given: Tensor,
    transposed: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
    interleaved: bool = False,
    **attrs: Any,
) -> tuple[Tensor, ...]:
    """Quantizes `weighted_swiglu`, the op of a package of models: the gate of experts times the weight of the row."""
    opened = experts_gate(gate_up, alpha=alpha, limit=limit, offset=offset, interleaved=interleaved)
    return _gated((opened * _of_rows(weights, order)).to(gate_up.dtype), given, **attrs)


def fp8_weighted_swiglu_bwd(
    dy: Tensor,
    gate_up: Tensor,
    weights: Tensor,
    order: Tensor,
    *given: Tensor,
    dtype: str,
    scaling: str,
    transposed: bool = False,
    wide: bool = False,
    alpha: float = 1.0,
    limit: float = 0.0,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, ...]:
    """`weighted_swiglu_bwd`, and the gradients of gate and up quantized, in the columns of gate_up."""
    d = up(dy) * _of_rows(weights, order)
    both, opened, value = experts_gate_bwd(d, gate_up, alpha=alpha, limit=limit, offset=offset, interleaved=interleaved)
    d_gate_up, d_weights = both.to(gate_up.dtype), torch.empty_like(weights)
    d_weights.view(-1)[order.long()] = (up(dy) * opened * value).sum(1)
    found = _Quantizer(d_gate_up, scaling, given, dtype)
    return found.q, *((d_gate_up,) if wide else ()), d_weights, *found.outs, *found.changed


def _of_rows(weights: Tensor, order: Tensor) -> Tensor:
    return weights.flatten()[order.long(), None]


def _gated(
    value: Tensor, given: tuple[Tensor, ...], *, dtype: str, scaling: str, transposed: bool = False, wide: bool = False
) -> tuple[Tensor, ...]:
    found = _Quantizer(value, scaling, given, dtype)
    return *found.copies(transposed), *((value,) if wide else ()), *found.outs, *found.changed


def _gated_bwd(
    value: Tensor,
    output: Tensor,
    given: tuple[Tensor, ...],
    *,
    dtype: str,
    scaling: str,
    transposed: bool = False,
    wide: bool = False,
    hidden: str = "",
) -> tuple[Tensor, ...]:
    again: tuple[Tensor, ...] = ()
    if hidden:
        scale, *rest = given
        given = tuple(rest)
        again = (_Quantizer(output, "given", (scale,), hidden).copies(True)[1],)
    found = _Quantizer(value, scaling, given, dtype)
    return *found.copies(transposed), *((value,) if wide else ()), *again, *found.outs, *found.changed


def _geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu by its tanh formula: the op `geglu` of a package of models."""
    gate, value = up(gate_up).chunk(2, dim=1)
    return (F.gelu(gate, approximate="tanh") * value).to(gate_up.dtype)


def _geglu_bwd(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, value = up(gate_up).chunk(2, dim=1)
    k, a = (2 / pi) ** 0.5, 0.044715
    t = torch.tanh(k * (gate + a * gate**3))
    half = (1 + t) / 2
    slope = half + gate * (1 - t.square()) * k * (1 + 3 * a * gate.square()) / 2
    return torch.cat((up(dy) * value * slope, up(dy) * gate * half), dim=1).to(gate_up.dtype)


def fp8_rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    rstd: Tensor,
    *given: Tensor,
    dtype: str,
    scaling: str,
    transposed: bool = False,
    residual: bool = False,
) -> tuple[Tensor, ...]:
    """`rmsnorm_bwd`, and its dx quantized. With `residual`, its last own input is dresidual."""
    dresidual, given = (given[0], given[1:]) if residual else (None, given)
    dx, dw = standard.rmsnorm_bwd(dy, x, w, rstd, dresidual)
    found = _Quantizer(dx, scaling, given, dtype)
    return *found.copies(transposed), dx, dw, *found.outs, *found.changed


def fp8_rmsnorm_dgrad(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    rstd: Tensor,
    *given: Tensor,
    dtype: str,
    scaling: str,
    transposed: bool = False,
    residual: bool = False,
) -> tuple[Tensor, ...]:
    """`rmsnorm_dgrad`, and its dx quantized. With `residual`, its last own input is dresidual."""
    dresidual, given = (given[0], given[1:]) if residual else (None, given)
    dx = standard.rmsnorm_dgrad(dy, x, w, rstd, dresidual)
    found = _Quantizer(dx, scaling, given, dtype)
    return *found.copies(transposed), dx, *found.outs, *found.changed


# ------------------------------------------------------------------------------------------------------------ products


def _product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, trans_a: bool, trans_b: bool) -> Tensor:
    """(a b^T) decode_a decode_b in fp32. a is [m, k] or, with trans_a, [k, m]; b is [n, k] or [k, n]."""
    left, right = a.float(), b.float()
    return ((left.T if trans_a else left) @ (right if trans_b else right.T)) * (scale_a[0] * scale_b[0])


def fp8_linear(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: str,
    fast: bool = False,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Tensor:
    """a b^T of quantized operands. `fast` allows kernels to keep partial sums in fewer bits."""
    product = _product(a, b, scale_a, scale_b, trans_a, trans_b)
    return (product if bias is None else product + bias.float()).to(TORCH_DTYPES[dtype])


def fp8_linear_add(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    base: Tensor,
    *,
    dtype: str,
    fast: bool = False,
    trans_a: bool = False,
    trans_b: bool = False,
) -> Tensor:
    """add(fp8_linear(a, b), base). A kernel need not round the product before the sum."""
    product = _product(a, b, scale_a, scale_b, trans_a, trans_b)
    return standard.add(product.to(base.dtype), base)


def fp8_grouped_linear(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    ends: Tensor,
    *added: Tensor,
    fast: bool = False,
    beside: bool = False,
) -> Tensor:
    """a b^T of the rows of each group, which end at `ends`, with its matrix of b [groups N, K]: -> bf16 [rows, N].

    With `beside`, the matrices of the groups are beside each other: b is [N, groups K], as the transposed copy of a
    stack [groups K, N] is. `fast` as in `fp8_linear`. Added before the sum is rounded: a bias of each group
    [groups, N], or the product of two operands in bf16, a2 and the stack b2, which is the branch of an adapter.
    """
    bounds = [0, *ends.tolist()]
    rows = [slice(start, end) for start, end in pairwise(bounds)]
    matrices = b.chunk(len(ends), dim=1 if beside else 0)
    sums = [_product(a[own], m, scale_a, scale_b, False, False) for own, m in zip(rows, matrices, strict=True)]
    if len(added) == 1:
        sums = [x + bias.float() for x, bias in zip(sums, added[0], strict=True)]
    elif added:
        a2, stack = added[0], added[1].float().chunk(len(ends))
        sums = [x + a2[own].float() @ (m if beside else m.T) for x, own, m in zip(sums, rows, stack, strict=True)]
    return torch.cat(sums).bfloat16()


def fp8_grouped_linear_part(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    ends: Tensor,
    *added: Tensor,
    first: int,
    fast: bool = False,
    beside: bool = False,
) -> Tensor:
    """base, with `fp8_grouped_linear` of the groups whose matrices b holds, from `first` on, in their rows."""
    count = b.shape[1] // a.shape[1] if beside else b.shape[0] // base.shape[1]
    start = int(ends[first - 1]) if first else 0
    own, rows = slice(first, first + count), slice(start, int(ends[first + count - 1]))
    if len(added) == 1:
        added = (added[0][own],)
    elif added:
        added = (added[0][rows], added[1].view(len(ends), -1, added[1].shape[1])[own].flatten(0, 1))
    y = fp8_grouped_linear(a[rows], b, scale_a, scale_b, ends[own] - start, *added, beside=beside)
    return torch.cat([base[: rows.start], y, base[rows.stop :]])


# ---------------------------------------------------------------------------------------------------- between the steps


def fp8_guard(norm: Tensor, clip_coef: Tensor, *amax: Tensor) -> tuple[Tensor, Tensor]:
    """(inf, NaN) if a quantizer has seen NaN or inf in this step, else (norm, clip_coef): such a step is skipped."""
    if any(a[1] != 0 for a in amax):
        return torch.full_like(norm, torch.inf), torch.full_like(clip_coef, torch.nan)
    return norm.clone(), clip_coef.clone()


def fp8_update(clip_coef: Tensor, history: Tensor, *states: Tensor, maxima: tuple[float, ...]) -> tuple[Tensor, ...]:
    """The delayed scales of the next step. `states` are the amax of each quantizer, then the scale of each.

    A quantizer whose amax of this step is not 0 stores it as the newest entry of its column of `history` [L, n], drops
    the oldest, and scales by the largest of all of them. If `clip_coef` is not finite, the step is skipped: history and
    scales stay. The amax of the next step starts at 0. Returns history, scales, amax.
    """
    count = len(maxima)
    amax, scales = states[:count], list(states[count:])
    new, is_applied = history.clone(), bool(clip_coef.isfinite())
    for i, maximum in enumerate(maxima):
        last = amax[i][0]
        if is_applied and last > 0:
            largest = torch.cat([history[1:, i], last[None]]).max()
            new[:, i] = torch.cat([history[1:, i], last[None]])
            new[0, i] = 0
            scales[i] = scale_of(largest, maximum)
        elif scales[i][0] == 0:
            scales[i] = torch.tensor([1.0, 0.0])
    return new, *(s.clone() for s in scales), *(torch.zeros_like(a) for a in amax)


# ------------------------------------------------------------------------------------------------------------- numerics


def fp8_count(x: Tensor, scale: Tensor, *, dtype: str) -> tuple[Tensor, Tensor]:
    """amax of x, and how many of its elements are clipped, rounded to 0, and not 0, if it is quantized by `scale`."""
    wide = (x.float() * torch.where(scale[1] == 0, 1.0, scale[1])).abs()
    clipped, lost = wide > CLIPPED_ABOVE[dtype], (wide <= LOST_BELOW[dtype]) & (x != 0)
    return fp8_amax(x), torch.stack([clipped.sum(), lost.sum(), (x != 0).sum()])


def fp8_report(
    *values: Tensor, sizes: tuple[int, ...], maxima: tuple[float, ...], columns: tuple[int, ...], history: bool
) -> Tensor:
    """The figures of n tensors, [n, 5] (`formats.COLUMNS`).

    `values` are the history [L, quantizers], with the attr `history`, then amax, counts and scale of each tensor.
    `columns` are those of the tensors in the history; -1 for a tensor that is scaled by its own magnitude.
    """
    seen, values = (values[0], values[1:]) if history else (torch.empty(0, 0), values)
    n = len(sizes)
    rows = []
    for i, (size, maximum, column) in enumerate(zip(sizes, maxima, columns, strict=True)):
        amax, counts, scale = values[i], values[n + i].float(), values[2 * n + i]
        factor = torch.where(scale[1] == 0, 1.0, scale[1])
        age = 0 if column < 0 else _age(seen[:, column], scale[1], maximum)
        lost = torch.where(counts[2] > 0, counts[1] / counts[2], 0.0)
        rows.append(
            torch.stack([amax[0], amax[0] * factor / maximum, counts[0] / size, lost, torch.tensor(float(age))])
        )
    return torch.stack(rows)


def _age(seen: Tensor, encode: Tensor, maximum: float) -> int:
    """Return how many steps ago the magnitude was recorded that made a scale; 0 if there is none.

    The oldest magnitude of a history takes part in the scale when it has just left.
    """
    if encode == 0:
        return 0
    made = [i for i, amax in enumerate(seen.tolist()) if amax > 0 and scale_of(seen[i], maximum)[1] == encode]
    return len(seen) - max(made, default=0)
