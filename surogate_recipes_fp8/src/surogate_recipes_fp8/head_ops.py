"""The ops of the LM head with cross-entropy by FP8 products.

    logits  = x w^T          E4M3 x E4M3
    dlogits                  E5M2
    dx      = dlogits w      E5M2 x E4M3
    dw      = dlogits^T x    E5M2 x E4M3

No operand has a history. x is scaled by the largest magnitude of the rows of a chunk. dlogits is the difference of
probabilities, of magnitude 1 at most, so its scale is known. w is quantized as the weights of blocks are.

Inputs are those of `lm_head_ce` with w in E4M3, then the scale of w and, for dx on GPUs whose products need it, w
transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Op, OpDef, OutSpec, Value, need


def _lm_head_ce(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    x, w, targets, loss_scale, w_scale = ins[:5]
    (tokens, width), (_, w_width) = x.shape, w.shape
    need(width == w_width, f"x has {width} columns, w has {w_width}")
    need(targets.shape == (tokens,) and targets.dtype == "int32", f"targets must be int32 [{tokens}]")
    need(loss_scale.shape == (), "loss_scale must be a scalar")
    need(w_scale.shape == (2,) and w_scale.dtype == "fp32", f"a scale is fp32 [2], got {w_scale!r}")
    need(tokens % attrs["chunks"] == 0, f"{tokens} tokens cannot be split into {attrs['chunks']} equal chunks")
    return [OutSpec("loss", (), "fp32")]


def _lm_head_ce_grads(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    x, w = ins[:2]
    need(len(ins) == 5 or ins[5].shape == w.shape[::-1], f"w transposed must have shape {list(w.shape[::-1])}")
    need(attrs["wrt"] in ((0,), (1,), (0, 1)), f"wrt must name x (0), w (1) or both in this order, not {attrs['wrt']}")
    grads = (OutSpec("d_norm", x.shape, x.dtype), OutSpec("d_weight", w.shape, "fp32"))
    return [*_lm_head_ce(ins, attrs), *(grads[i] for i in attrs["wrt"])]


def _logits(op: Op) -> int:
    return op.ins[0].shape[0] * op.ins[1].shape[0]


def computes_dw(op: Op) -> bool:
    return 1 in op.attrs.get("wrt", ())


def _flops(op: Op) -> int:
    return 2 * len(op.outs) * _logits(op) * op.ins[0].shape[1]


def _passes(op: Op) -> int:
    """Return the bytes of the cross-entropy, which reads logits and writes codes, of their transpose, and of x's."""
    codes = 3 if computes_dw(op) else 1 if op.attrs.get("wrt") else 0
    return (2 + codes) * _logits(op) + (10 if computes_dw(op) else 9) * op.ins[0].size


def _workspace(op: Op) -> int:
    """Bytes of the logits of one chunk, in bf16, and of their codes, transposed."""
    return (3 if computes_dw(op) else 2) * _logits(op) // int(op.attrs["chunks"])


_COMMON: Mapping[str, Any] = {
    "flops": _flops,
    "math": lambda op: "fp8",
    "passes": _passes,
    "workspace": _workspace,
}
_ATTRS: Mapping[str, Any] = {"chunks": int, "softcap": (float, 0.0), "fast": (bool, False)}

HEAD: tuple[OpDef, ...] = (
    OpDef(
        kind="fp8_lm_head_ce",
        infer=_lm_head_ce,
        reference="surogate_recipes_fp8.head_reference:fp8_lm_head_ce",
        attrs=_ATTRS,
        **_COMMON,
    ),
    OpDef(
        kind="fp8_lm_head_ce_grads",
        infer=_lm_head_ce_grads,
        reference="surogate_recipes_fp8.head_reference:fp8_lm_head_ce_grads",
        attrs={**_ATTRS, "wrt": tuple, "fast_dx": (bool, False)},
        **_COMMON,
    ),
)
