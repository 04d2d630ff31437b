"""Torch references of the standard ops. Names and arguments are those of `standard_ops/`.

Every function upcasts its operands, computes in fp32 (fp64 for fp64 inputs) and rounds each output once. For example, a
bf16 product is the fp32 product of the upcast operands, rounded to bf16. No function writes to its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rounding import TORCH_DTYPES, accumulator, random_16_bits, round_stochastic


def up(x: Tensor) -> Tensor:
    """Upcast `x` to the dtype in which ops compute."""
    return x.to(accumulator(x.dtype))


# ---------------------------------------------------------------------------------------------------------- embedding


def embedding(tokens: Tensor, w: Tensor) -> Tensor:
    """The rows of w that the tokens name."""
    return w[tokens.long()]


def embedding_bwd(dy: Tensor, tokens: Tensor, *, vocab_size: int, dtype: str | None = None) -> Tensor:
    """The sum of the rows of dy with each token of the vocabulary, in `dtype`; None: not rounded."""
    dw = torch.zeros(vocab_size, dy.shape[1], dtype=accumulator(dy.dtype))
    return _as(dw.index_add_(0, tokens.long(), up(dy)), dtype, dw.dtype)


# ------------------------------------------------------------------------------------------------------------- linear


def _as(x: Tensor, dtype: str | None, default: torch.dtype) -> Tensor:
    return x.to(TORCH_DTYPES[dtype] if dtype else default)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, dtype: str | None = None) -> Tensor:
    """x w^T + bias, in `dtype`; None: that of x."""
    y = F.linear(up(x), up(w), None if bias is None else up(bias))
    return _as(y, dtype, x.dtype)


def linear_add(x: Tensor, w: Tensor, base: Tensor, *, dtype: str | None = None) -> Tensor:
    """add(linear(x, w), base). A kernel need not round the product before the sum."""
    return add(F.linear(up(x), up(w)).to(base.dtype), base)


def linear_pair(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor, *, dtype: str | None = None) -> Tensor:
    """add(linear(x, w), linear(x2, w2)). A kernel need not round the products before the sum."""
    return add(linear(x, w, dtype=dtype), linear(x2, w2, dtype=dtype))


def linear_dgrad(dy: Tensor, w: Tensor, *, dtype: str | None = None) -> Tensor:
    """dy w, in `dtype`; None: that of dy."""
    return _as(up(dy) @ up(w), dtype, dy.dtype)


def linear_dgrad_add(dy: Tensor, w: Tensor, base: Tensor, *, dtype: str | None = None) -> Tensor:
    """add(linear_dgrad(dy, w), base). A kernel need not round the product before the sum."""
    return add((up(dy) @ up(w)).to(base.dtype), base)


def linear_dgrad_pair(dy: Tensor, w: Tensor, dy2: Tensor, w2: Tensor, *, dtype: str | None = None) -> Tensor:
    """add(linear_dgrad(dy, w), linear_dgrad(dy2, w2)). A kernel need not round the products before the sum."""
    return add(linear_dgrad(dy, w, dtype=dtype), linear_dgrad(dy2, w2, dtype=dtype))


def linear_wgrad(dy: Tensor, x: Tensor, *, dtype: str | None = None) -> Tensor:
    """dy^T x, in `dtype`; None: not rounded."""
    dw = up(dy).T @ up(x)
    return _as(dw, dtype, dw.dtype)


def linear_bgrad(dy: Tensor) -> Tensor:
    """The sum of dy over the tokens."""
    return up(dy).sum(0)


# -------------------------------------------------------------------------------------------------------------- norms


def rmsnorm(x: Tensor, w: Tensor, *, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """norm = x * rstd * (w + offset), rstd = 1 / sqrt(mean(x^2) + eps)."""
    wide = up(x)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return _norm(x, w, rstd, offset), rstd


def _norm(x: Tensor, w: Tensor, rstd: Tensor, offset: float) -> Tensor:
    return (up(x) * rstd[:, None] * (up(w) + offset)).to(x.dtype)


def add_rmsnorm(
    x: Tensor, residual: Tensor, w: Tensor, *, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """residual = x + residual, rounded; norm = rmsnorm(residual).

    The norm is computed from the rounded sum so that it can be recomputed from the stored residual.
    """
    total = (up(x) + up(residual)).to(residual.dtype)
    norm, rstd = rmsnorm(total, w, eps=eps, offset=offset)
    return norm, rstd, total


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dresidual: Tensor | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """dx of `rmsnorm_dgrad`; dw = sum over tokens of dy * n."""
    dw = (up(dy) * (up(x) * rstd[:, None])).sum(0)
    return rmsnorm_dgrad(dy, x, w, rstd, dresidual, offset=offset), dw


def rmsnorm_dgrad(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dresidual: Tensor | None = None, *, offset: float = 0.0
) -> Tensor:
    """dx = rstd * (g - n * mean(g * n)) + dresidual with n = x * rstd, g = dy * (w + offset)."""
    normed = up(x) * rstd[:, None]
    g = up(dy) * (up(w) + offset)
    dx = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd[:, None]
    if dresidual is not None:
        dx = dx + up(dresidual)
    return dx.to(x.dtype)


def rmsnorm_bwd_recompute(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dresidual: Tensor | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of `rmsnorm_bwd`, and the norm."""
    return *rmsnorm_bwd(dy, x, w, rstd, dresidual, offset=offset), _norm(x, w, rstd, offset)


def rmsnorm_dgrad_recompute(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dresidual: Tensor | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the output of `rmsnorm_dgrad`, and the norm."""
    return rmsnorm_dgrad(dy, x, w, rstd, dresidual, offset=offset), _norm(x, w, rstd, offset)


# ------------------------------------------------------------------------------------------------------------- swiglu


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, value = up(gate_up).chunk(2, dim=1)
    return (F.silu(gate) * value).to(gate_up.dtype)


def swiglu_bwd(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradients of gate and up."""
    gate, value = up(gate_up).chunk(2, dim=1)
    d, sigmoid = up(dy), torch.sigmoid(gate)
    dgate = d * value * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, d * gate * sigmoid), dim=1).to(gate_up.dtype)


def swiglu_bwd_recompute(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of `swiglu_bwd` and of `swiglu`."""
    return swiglu_bwd(dy, gate_up), swiglu(gate_up)


# ------------------------------------------------------------------------------------------ LM head and cross-entropy


def _chunks(targets: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Indices of labelled rows in chunks of T / chunks. Unlabelled rows are skipped."""
    return (targets >= 0).nonzero().flatten().split(targets.shape[0] // chunks)


def _logits(x: Tensor, w: Tensor, softcap: float) -> Tensor:
    logits = up(linear(x, w))
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def lm_head_ce(
    x: Tensor, w: Tensor, targets: Tensor, loss_scale: Tensor, *, chunks: int, softcap: float = 0.0
) -> Tensor:
    """loss_scale * sum over labelled rows of -log softmax(x w^T)[target]. Products are rounded to the dtype of x.

    softcap: softmax(softcap * tanh(x w^T / softcap)); 0: no cap.
    """
    loss = torch.zeros((), dtype=accumulator(x.dtype))
    for rows in _chunks(targets, chunks):
        logits = _logits(x[rows], w, softcap)
        loss = loss + F.cross_entropy(logits, targets[rows].long(), reduction="sum")
    return loss * loss_scale


def lm_head_ce_grads(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    loss_scale: Tensor,
    *,
    chunks: int,
    wrt: Sequence[int],
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of the inputs in `wrt`: 0 selects dx [T, C], 1 selects dw [V, C].

    dlogits = (softmax - onehot) * loss_scale, rounded to the dtype of x; with a cap, of capped logits y, times
    1 - (y / softcap)^2.
    """
    loss = torch.zeros((), dtype=accumulator(x.dtype))
    dx = torch.zeros_like(x) if 0 in wrt else None
    dw = torch.zeros(w.shape, dtype=accumulator(x.dtype)) if 1 in wrt else None
    for rows in _chunks(targets, chunks):
        labels = targets[rows].long()
        logits = _logits(x[rows], w, softcap)
        log_probs = logits.log_softmax(-1)
        loss = loss - log_probs.gather(1, labels[:, None]).sum()
        dlogits = log_probs.exp_()
        dlogits[torch.arange(len(rows)), labels] -= 1
        if softcap:
            dlogits *= 1 - (logits / softcap).square()
        dlogits = up((dlogits * loss_scale).to(x.dtype))
        if dx is not None:
            dx[rows] = (dlogits @ up(w)).to(x.dtype)
        if dw is not None:
            dw.addmm_(dlogits.T, up(x[rows]))
    return loss * loss_scale, *(gradient for gradient in (dx, dw) if gradient is not None)


# ------------------------------------------------------------------------------------------------------------- others


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    return (up(a) + up(b)).to(a.dtype)


def cast(x: Tensor, *, dtype: str) -> Tensor:
    """Cast with rounding to nearest. Casts to FP8 saturate and keep NaN; torch's cast to E5M2 overflows to infinity."""
    target = TORCH_DTYPES[dtype]
    if dtype in ("e4m3", "e5m2"):
        largest = torch.finfo(target).max
        x = x.clamp(-largest, largest)
    return x.to(target)


def fill(*, shape: Sequence[int], dtype: str, value: float) -> Tensor:
    """A value of `shape` and `dtype` with `value` in each element."""
    return torch.full(tuple(shape), value, dtype=TORCH_DTYPES[dtype])


def unwritten(*, shape: Sequence[int], dtype: str) -> Tensor:
    """Memory whose contents later ops write. Kernels leave it as it is."""
    return torch.zeros(tuple(shape), dtype=TORCH_DTYPES[dtype])


def accumulate_rounded(
    addend: Tensor, total: Tensor, micro_step: Tensor, seed: Tensor, *, stream: int, firsts: Sequence[int] = (0,)
) -> Tensor:
    """total + addend in fp32, rounded stochastically to bf16. Random bits: (seed, micro_step, stream, element).

    firsts: the element of the whole that the values begin with.
    """
    bits = random_16_bits(total.numel(), seed=int(seed), stream=stream, step=int(micro_step), first=firsts[0])
    return round_stochastic(up(total) + addend, bits)


def copy(x: Tensor) -> Tensor:
    """x in another buffer."""
    return x


def move(x: Tensor) -> Tensor:
    """x on the host if it is on the lane "to_host", on the device if on "to_device"."""
    return x


def wait(*values: Tensor) -> tuple[()]:
    """Nothing: on a CPU, ops run one after another."""
    return ()


def commit(clip_coef: Tensor, pending: Tensor, state: Tensor) -> Tensor:
    """Return `pending`, or `state` if `clip_coef` is not finite, because the step is then skipped."""
    return pending if bool(torch.isfinite(clip_coef)) else state


def reference_vjp(
    *args: Tensor,
    reference: str,
    of: str,
    of_attrs: Mapping[str, Any],
    n_ins: int,
    given: Sequence[int],
    wrt: Sequence[int],
) -> tuple[Tensor, ...]:
    """Differentiate an op's reference by autograd.

    `args` are the op's `n_ins` inputs, then the gradients of its outputs `given`. Returns the gradients of its inputs
    `wrt`: zeros if the outputs `given` do not depend on them. Raises ValueError if no output does.
    """
    ins, grads = list(args[:n_ins]), args[n_ins:]
    leaves = {i: ins[i].detach().clone().requires_grad_() for i in wrt}
    with torch.enable_grad():
        outs = load(reference)(*[leaves.get(i, x) for i, x in enumerate(ins)], **of_attrs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        if not any(out.requires_grad for out in outs):
            raise ValueError(f"the reference of {of} gives no gradient (detach, no_grad?): give the op a vjp")
        reached = [(outs[i], g) for i, g in zip(given, grads, strict=True) if outs[i].requires_grad]
        if not reached:
            return tuple(torch.zeros_like(leaves[i]) for i in wrt)
        return torch.autograd.grad(
            [out for out, _ in reached],
            [leaves[i] for i in wrt],
            [g for _, g in reached],
            allow_unused=True,
            materialize_grads=True,
        )


def load(reference: str) -> Callable[..., Any]:
    """Import the function named by an OpDef's "module:function"."""
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
