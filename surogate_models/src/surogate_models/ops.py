"""Ops of these models: RoPE of every query and key head, alone or after an RMS norm of the head.

    rope         (qkv [T, (H+2G)D], positions int32 [T];
                  n_heads H, n_kv_heads G, head_dim D, theta, scaling, attention_factor, query_scaling)
                                                                                         -> [T, (H+2G)D]
    qk_norm_rope (qkv [T, (H+2G)D], q_norm [D], k_norm [D], positions int32 [T];
                  the same attributes but query_scaling, eps and offset) -> [T, (H+2G)D]

    join_qkv     (q [T, A], k [T, B], v [T, C]) -> [T, A + B + C]
    split_qkv    (qkv [T, A + B + C]; widths (A, B, C)) -> [T, A], [T, B], [T, C]

Columns are [q; k; v] as in `attention`. The v columns are copied. If qkv (dy in the backward ops) is read for the last
time, the output takes its place, and the v columns stay where they are. RoPE rotates the pairs (i, i + D/2) (half
layout) by the angle position * theta^(-2i/D) and multiplies them by `attention_factor` (default 1). `scaling`, a
`Scaling` of rope.py or None (the default), changes the frequencies. With `rotary_dim` R, the first R elements of a head
are rotated as if they were the head, and the others are copied; 0 (the default) means all. `offset` (default 0) is
added to the norm weights. `query_scaling`, a `QueryScaling` or None (the default), multiplies all elements of
query heads by a factor of the position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import (
    Emitter,
    Gradients,
    Op,
    OpDef,
    OutSpec,
    ProgramError,
    Rewrites,
    RowWise,
    Value,
    accumulator,
    first_output,
)

from .rope import QueryScaling, Scaling

_REFERENCE = "surogate_models.reference"


def _infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    qkv, q_norm, k_norm, positions = ins
    if q_norm.shape != (attrs["head_dim"],) or k_norm.shape != (attrs["head_dim"],):
        raise ProgramError(f"q_norm and k_norm must have shape [{attrs['head_dim']}]")
    return _infer_rope((qkv, positions), attrs)


def _infer_rope(ins: Sequence[Value], attrs: Mapping[str, Any], label: str = "rope") -> list[OutSpec]:
    qkv, positions = ins
    width = (attrs["n_heads"] + 2 * attrs["n_kv_heads"]) * attrs["head_dim"]
    if len(qkv.shape) != 2 or qkv.shape[1] != width:
        raise ProgramError(f"qkv must have two dimensions and {width} columns")
    if attrs["head_dim"] % 2:
        raise ProgramError(f"head_dim must be even, got {attrs['head_dim']}")
    rotary_dim = attrs.get("rotary_dim", 0)
    if rotary_dim % 2 or not 0 <= rotary_dim <= attrs["head_dim"]:
        raise ProgramError(f"rotary_dim must be even and at most head_dim {attrs['head_dim']}, got {rotary_dim}")
    scaled: QueryScaling | None = attrs.get("query_scaling")
    if scaled is not None and (scaled.beta < 0 or scaled.length < 1):
        raise ProgramError(f"query_scaling must have a beta of at least 0 and a length of at least 1, got {scaled}")
    if positions.dtype != "int32" or positions.shape != qkv.shape[:1]:
        raise ProgramError(f"positions must be int32 [{qkv.shape[0]}]")
    return [OutSpec(label, qkv.shape, qkv.dtype)]


def _vjp_rope(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The gradient is rotated by the opposite angles, so no activation is kept."""
    (dy,) = grads
    assert dy is not None
    return b.apply("rope_bwd", dy, op.ins[1], **op.attrs), None


def _infer_rope_bwd(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return _infer_rope(ins, attrs, "d_qkv")


def _vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The backward op recomputes the norms from qkv, which is cheaper than storing rstd per head and token."""
    (dy,) = grads
    assert dy is not None
    dqkv, dq_norm, dk_norm = b.emit("qk_norm_rope_bwd", dy, *op.ins, **op.attrs)
    return dqkv, dq_norm, dk_norm, None


def _infer_bwd(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    dy, qkv, q_norm, k_norm, positions = ins
    _infer((qkv, q_norm, k_norm, positions), attrs)
    if dy.shape != qkv.shape:
        raise ProgramError(f"dy is {list(dy.shape)}, qkv {list(qkv.shape)}")
    total = accumulator(qkv.dtype)
    return [
        OutSpec("d_qkv", qkv.shape, qkv.dtype),
        OutSpec("d_q_norm", q_norm.shape, total),
        OutSpec("d_k_norm", k_norm.shape, total),
    ]


def _infer_dgrad(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return _infer_bwd(ins, attrs)[:1]


def _infer_join(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    q = ins[0]
    if any(len(x.shape) != 2 or x.shape[0] != q.shape[0] or x.dtype != q.dtype for x in ins):
        raise ProgramError("q, k and v must be matrices of one dtype with as many rows")
    return [OutSpec("qkv", (q.shape[0], sum(x.shape[1] for x in ins)), q.dtype)]


def _vjp_join(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return b.emit("split_qkv", dy, widths=tuple(x.shape[1] for x in op.ins))


def _infer_split(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (qkv,) = ins
    if len(qkv.shape) != 2 or len(attrs["widths"]) != 3 or sum(attrs["widths"]) != qkv.shape[1]:
        raise ProgramError(f"widths {attrs['widths']} must be three and make up the columns of {qkv!r}")
    labels = ("d_q", "d_k", "d_v")
    return [OutSpec(label, (qkv.shape[0], n), qkv.dtype) for label, n in zip(labels, attrs["widths"], strict=True)]


_ROTATION: Mapping[str, Any] = {
    "n_heads": int,
    "n_kv_heads": int,
    "head_dim": int,
    "theta": float,
    "scaling": (Scaling | None, None),
    "attention_factor": (float, 1.0),
    "rotary_dim": (int, 0),
}

_ROPE: Mapping[str, Any] = {**_ROTATION, "query_scaling": (QueryScaling | None, None)}
_NORM: Mapping[str, Any] = {**_ROTATION, "eps": float, "offset": (float, 0.0)}


def _every_row(op: Op) -> RowWise:
    return RowWise(ins=tuple(range(len(op.ins))), outs=tuple(range(len(op.outs))))


OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="rope",
        infer=_infer_rope,
        attrs=_ROPE,
        reference=f"{_REFERENCE}:rope",
        vjp=_vjp_rope,
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: 3 * op.ins[0].size,
        row_wise=lambda op: RowWise(ins=(0, 1), outs=(0,)),
    ),
    OpDef(
        kind="rope_bwd",
        infer=_infer_rope_bwd,
        attrs=_ROPE,
        reference=f"{_REFERENCE}:rope_bwd",
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: 3 * op.ins[0].size,
        row_wise=lambda op: RowWise(ins=(0, 1), outs=(0,)),
    ),
    OpDef(
        kind="qk_norm_rope",
        infer=_infer,
        attrs=_NORM,
        reference=f"{_REFERENCE}:qk_norm_rope",
        vjp=_vjp,
        may_overwrite=lambda op: {0: 0},  # without a backward pass, which reads qkv again
        flops=lambda op: 7 * op.ins[0].size,  # per element: norm 4, RoPE 3
        row_wise=lambda op: RowWise(ins=(0, 3), outs=(0,)),
    ),
    OpDef(
        kind="qk_norm_rope_bwd",
        infer=_infer_bwd,
        attrs=_NORM,
        reference=f"{_REFERENCE}:qk_norm_rope_bwd",
        rewrites=Rewrites(narrowed=first_output("qk_norm_rope_dgrad")),
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: 15 * op.ins[1].size,  # per element: recomputed norm 3, its gradients 9, RoPE 3
        row_wise=lambda op: RowWise(ins=(0, 1, 4), outs=(0,), sums=(1, 2)),
    ),
    OpDef(
        kind="qk_norm_rope_dgrad",
        infer=_infer_dgrad,
        attrs=_NORM,
        reference=f"{_REFERENCE}:qk_norm_rope_dgrad",
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: 13 * op.ins[1].size,
        row_wise=lambda op: RowWise(ins=(0, 1, 4), outs=(0,)),
    ),
    OpDef(kind="join_qkv", infer=_infer_join, reference=f"{_REFERENCE}:join_qkv", vjp=_vjp_join, row_wise=_every_row),
    OpDef(
        kind="split_qkv",
        infer=_infer_split,
        attrs={"widths": tuple},
        reference=f"{_REFERENCE}:split_qkv",
        row_wise=_every_row,
    ),
)
