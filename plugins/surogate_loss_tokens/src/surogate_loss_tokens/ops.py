"""`lm_head_tokens`: what the LM head says of each label, without ever holding all logits; `token_loss`: sums of it.

Its outputs are enough for any loss that is a function of the labels' log-probabilities, of logsumexps or of mean
logits. The backward pass computes the logits of a chunk once more: with the gradients a, b, c of the three outputs, the
gradient of the logits of a token is

    a (onehot - softmax) + b softmax + c / V

times 1 - (logit / softcap)^2 if the model caps its logits. So a loss pays one product of the LM head more than
`lm_head_ce`, whose gradient is known in the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import (
    DTYPES,
    Emitter,
    Gradients,
    Op,
    OpDef,
    OutSpec,
    ProgramError,
    Rewrites,
    Value,
    accumulator,
    first_output,
)

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

_REFERENCE = "surogate_loss_tokens.reference"
_HEAD: Mapping[str, Any] = {"chunks": int, "softcap": (float, 0.0)}


def _checked(ins: Ins, attrs: Attrs) -> int:
    """Return the number of tokens. Raises ProgramError if the shapes do not fit together."""
    x, w, targets, *others = ins
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise ProgramError(f"x must be [T, C] and w [V, C], not {x!r} and {w!r}")
    tokens = x.shape[0]
    if targets.shape != (tokens,) or targets.dtype != "int32":
        raise ProgramError(f"targets must be int32 [{tokens}], not {targets!r}")
    if tokens % attrs["chunks"]:
        raise ProgramError(f"{tokens} tokens cannot be split into {attrs['chunks']} equal chunks")
    for value in others:
        if value.shape != (tokens,) or value.dtype != accumulator(x.dtype):
            raise ProgramError(f"expected {accumulator(x.dtype)} [{tokens}], not {value!r}")
    return tokens


def _tokens(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    shape, dtype = (_checked(ins, attrs),), accumulator(ins[0].dtype)
    return [OutSpec(label, shape, dtype) for label in ("log_probs", "logsumexp", "mean_logit")]


def _backward(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    _checked(ins, attrs)
    x, w = ins[:2]
    return [OutSpec("d_norm", x.shape, x.dtype), OutSpec("d_weight", w.shape, accumulator(x.dtype))]


def _vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    dx, dw = b.emit("lm_head_tokens_bwd", *op.ins, op.outs[1], *_or_zeros(b, op, grads), **op.attrs)
    return dx, dw, None


def _or_zeros(b: Emitter, op: Op, grads: Gradients) -> list[Value]:
    """Return the gradients of the op's outputs, which are alike. Those that nothing depends on are the same zeros."""
    given = [gradient for gradient in grads if gradient is not None]
    if len(given) == len(grads):
        return given
    zeros = b.apply("fill", shape=op.outs[0].shape, dtype=op.outs[0].dtype, value=0.0)
    return [gradient or zeros for gradient in grads]


def _flops(op: Op) -> int:
    """FLOPs of one product for the logits and one for each gradient."""
    products = {"lm_head_tokens": 1, "lm_head_tokens_dgrad": 2, "lm_head_tokens_bwd": 3}
    return 2 * products[op.kind] * op.ins[0].size * op.ins[1].shape[0]


def _logits(op: Op) -> int:
    """Bytes of all logits, which never exist together."""
    x, w = op.ins[:2]
    return x.shape[0] * DTYPES[x.dtype].nbytes(w.shape[0])


_COMMON: Mapping[str, Any] = {
    "attrs": _HEAD,
    "param_kinds": {1: "head"},
    "flops": _flops,
    "passes": lambda op: _logits(op) * (1 if op.kind == "lm_head_tokens" else 2),
    "workspace": lambda op: _logits(op) // int(op.attrs["chunks"]),
}


def _sums(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    log_probs, logsumexp, mean_logit, _, *weights = ins
    if {value.shape for value in (logsumexp, mean_logit, *weights)} != {log_probs.shape}:
        raise ProgramError(f"log_probs, logsumexp, mean_logit and weights must be alike, not {list(ins)}")
    return [OutSpec(label, (), log_probs.dtype) for label in ("loss", "z_loss", "cross_entropy")]


def _sums_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    _, logsumexp, _, scale, *weights = op.ins
    given = _or_zeros(b, op, grads)
    own = b.emit("token_loss_bwd", logsumexp, scale, *given, *weights, **op.attrs)
    return (*own, None, *(None for _ in weights))


def _sums_backward(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    shape, dtype = ins[0].shape, ins[0].dtype
    return [OutSpec(label, shape, dtype) for label in ("d_log_probs", "d_logsumexp", "d_mean_logit")]


_SUMS: Mapping[str, Any] = {"smoothing": (float, 0.0), "z": (float, 0.0)}


OPS: tuple[OpDef, ...] = (
    OpDef(kind="lm_head_tokens", infer=_tokens, reference=f"{_REFERENCE}:lm_head_tokens", vjp=_vjp, **_COMMON),
    OpDef(
        kind="lm_head_tokens_bwd",
        infer=_backward,
        reference=f"{_REFERENCE}:lm_head_tokens_bwd",
        rewrites=Rewrites(narrowed=first_output("lm_head_tokens_dgrad")),
        **_COMMON,
    ),
    OpDef(
        kind="lm_head_tokens_dgrad",
        infer=lambda ins, attrs: _backward(ins, attrs)[:1],
        reference=f"{_REFERENCE}:lm_head_tokens_dgrad",
        **_COMMON,
    ),
    OpDef(kind="token_loss", infer=_sums, reference=f"{_REFERENCE}:token_loss", attrs=_SUMS, vjp=_sums_vjp),
    OpDef(kind="token_loss_bwd", infer=_sums_backward, reference=f"{_REFERENCE}:token_loss_bwd", attrs=_SUMS),
)
