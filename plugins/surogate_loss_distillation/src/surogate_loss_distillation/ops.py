"""`lm_head_distill`: the LM head, cross-entropy and the divergence from a teacher, chunk by chunk.

Of the teacher, the op knows k probabilities per token and that of all other tokens together, the remainder. So does it
of the student: both distributions have k + 1 buckets, or k if these are the whole vocabulary. As with `lm_head_ce`, the
gradient is known in the forward pass, so nothing is computed twice and logits exist for one chunk of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import DTYPES, Op, OpDef, OutSpec, ProgramError, Value, accumulator

Ins = Sequence[Value]
Attrs = Mapping[str, Any]

_REFERENCE = "surogate_loss_distillation.reference"
_HEAD: Mapping[str, Any] = {
    "chunks": int,
    "weight": float,
    "temperature": float,
    "reverse": bool,
    "softcap": (float, 0.0),
}


def _distill(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w, targets, ids, log_probs, scale = ins
    if len(x.shape) != 2 or len(w.shape) != 2 or x.shape[1] != w.shape[1]:
        raise ProgramError(f"x must be [T, C] and w [V, C], not {x!r} and {w!r}")
    tokens, vocabulary = x.shape[0], w.shape[0]
    if targets.shape != (tokens,) or targets.dtype != "int32":
        raise ProgramError(f"targets must be int32 [{tokens}], not {targets!r}")
    if tokens % attrs["chunks"]:
        raise ProgramError(f"{tokens} tokens cannot be split into {attrs['chunks']} equal chunks")
    if len(ids.shape) != 2 or ids.shape[0] != tokens or not 1 <= ids.shape[1] <= vocabulary or ids.dtype != "int32":
        raise ProgramError(f"ids must be int32 [{tokens}, k] with k of 1 to {vocabulary}, not {ids!r}")
    if log_probs.shape != (tokens, ids.shape[1] + 1) or log_probs.dtype != "fp32":
        raise ProgramError(f"log_probs must be fp32 [{tokens}, {ids.shape[1] + 1}], not {log_probs!r}")
    if scale.shape != ():
        raise ProgramError(f"loss_scale must be a scalar, not {scale!r}")
    if not 0 <= attrs["weight"] <= 1 or attrs["temperature"] <= 0:
        raise ProgramError("weight must be from 0 to 1, and temperature positive")
    return [OutSpec(label, (), accumulator(x.dtype)) for label in ("loss", "cross_entropy", "divergence")]


def _distill_grads(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    x, w = ins[:2]
    grads = (OutSpec("d_norm", x.shape, x.dtype), OutSpec("d_weight", w.shape, accumulator(x.dtype)))
    if attrs["wrt"] not in ((0,), (1,), (0, 1)):
        raise ProgramError(f"wrt must name x (0), w (1) or both in this order, not {attrs['wrt']}")
    return [*_distill(ins, attrs), *(grads[i] for i in attrs["wrt"])]


def _flops(op: Op) -> int:
    """FLOPs of one product for the logits and one for each gradient."""
    return 2 * (len(op.outs) - 2) * op.ins[0].size * op.ins[1].shape[0]


def _logits(op: Op) -> int:
    """Bytes of all logits, which never exist together."""
    x, w = op.ins[:2]
    return x.shape[0] * DTYPES[x.dtype].nbytes(w.shape[0])


_COMMON: Mapping[str, Any] = {
    "param_kinds": {1: "head"},
    "flops": _flops,
    "passes": lambda op: _logits(op) * (1 if op.kind == "lm_head_distill" else 3),
    "workspace": lambda op: _logits(op) // int(op.attrs["chunks"]),
}

OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="lm_head_distill",
        infer=_distill,
        reference=f"{_REFERENCE}:lm_head_distill",
        attrs=_HEAD,
        loss_with_grads="lm_head_distill_grads",
        loss_grad_ins=(0, 1),
        **_COMMON,
    ),
    OpDef(
        kind="lm_head_distill_grads",
        infer=_distill_grads,
        reference=f"{_REFERENCE}:lm_head_distill_grads",
        attrs={**_HEAD, "wrt": tuple},
        **_COMMON,
    ),
)
