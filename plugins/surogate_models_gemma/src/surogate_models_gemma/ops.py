"""Ops of these models.

scale (x [...]; factor) -> x * factor            of the embedding
geglu (gate_up [T, 2F]) -> gelu(gate) * up       columns are the halves [gate; up]; gelu by its tanh formula
norm_add_rmsnorm (y, residual [T, C], post_w, w [C]; eps, offset) -> norm [T, C], rstd [T], total [T, C]
                                                 total = residual + rmsnorm(y, post_w), norm = rmsnorm(total, w): what
                                                 `rmsnorm` and `add_rmsnorm` compute, with 4 of 6 passes over [T, C]
                                                 forward and 6 of 7 backward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, ProgramError, Rewrites, Value, accumulator

_REFERENCE = "surogate_models_gemma.reference"


def _scale(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec(ins[0].label or "scaled", ins[0].shape, ins[0].dtype)]


def _scale_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return (b.apply("scale", dy, **op.attrs),)


def _geglu(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """The label is that of `swiglu`, which `recompute_swiglu` and others drop."""
    (gate_up,) = ins
    if len(gate_up.shape) != 2 or gate_up.shape[1] % 2:
        raise ProgramError(f"gate_up must have two dimensions and an even number of columns, got {gate_up!r}")
    return [OutSpec("swiglu", (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)]


def _geglu_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    return (b.apply("geglu_bwd", dy, op.ins[0], label=f"d_{op.ins[0].label}"),)


def _geglu_bwd(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    dy, gate_up = ins
    if 2 * dy.size != gate_up.size:
        raise ProgramError(f"dy is {list(dy.shape)}, gate_up {list(gate_up.shape)}")
    return [OutSpec("d_gate_up", gate_up.shape, gate_up.dtype)]


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


def _norms(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    y, residual, post_w, w = ins
    _need(len(y.shape) == 2, f"y must have two dimensions, got {y!r}")
    _need(y.shape == residual.shape and y.dtype == residual.dtype, f"{y!r} cannot be added to {residual!r}")
    _need(post_w.shape == w.shape == y.shape[1:], f"weights must have shape {list(y.shape[1:])}")
    wide = accumulator(y.dtype)
    same = [OutSpec(label, y.shape, y.dtype) for label in ("norm", "residual")]
    return [same[0], OutSpec("rstd", y.shape[:1], wide), same[1]]


def _norms_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    dnorm, drstd, dtotal = grads
    y, _, post_w, w = op.ins
    _, rstd, total = op.outs
    _need(drstd is None, "the loss reads rstd, which has no backward rule")
    if dnorm is None:
        assert dtotal is not None
        _, post_rstd = b.emit("rmsnorm", y, post_w, **op.attrs)
        dy, dpost_w = b.emit("rmsnorm_bwd", dtotal, y, post_w, post_rstd, offset=op.attrs.get("offset", 0.0))
        return dy, dtotal, dpost_w, None
    ins = (dnorm, total, w, rstd, y, post_w, *([] if dtotal is None else [dtotal]))
    labels = ("d_residual", f"d_{y.label}")
    dx, dy, dw, dpost_w = b.emit("norm_add_rmsnorm_bwd", *ins, label=labels, **op.attrs)
    return dy, dx, dpost_w, dw


def _norms_rematerialize(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
    """Recompute the norm from the stored sum if there is one, as `add_rmsnorm` does."""
    norm, _, total = op.outs
    if total not in kept:
        return b.emit(op.kind, *op.ins, label=norm.label, **op.attrs)
    return *b.emit("rmsnorm", total, op.ins[3], label=norm.label, **op.attrs), None


def _norms_dgrad(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    dnorm, total, w, rstd, y, post_w, *rest = ins
    _need(len(rest) <= 1, f"takes six or seven inputs, got {len(ins)}")
    for value in (total, y, *rest):
        _need(value.shape == dnorm.shape, f"{value!r} must have the shape of dnorm, {list(dnorm.shape)}")
    _need(rstd.shape == dnorm.shape[:1], f"rstd must have shape {list(dnorm.shape[:1])}")
    _need(w.shape == post_w.shape == dnorm.shape[1:], f"weights must have shape {list(dnorm.shape[1:])}")
    return [OutSpec("d_residual", total.shape, total.dtype), OutSpec("d_y", y.shape, y.dtype)]


def _norms_bwd(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    weights = [OutSpec("d_weight", w.shape, accumulator(ins[1].dtype)) for w in (ins[2], ins[5])]
    return [*_norms_dgrad(ins, attrs), *weights]


def _norms_bwd_recompute(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [*_norms_bwd(ins, attrs), OutSpec("norm", ins[1].shape, ins[1].dtype)]


def _norms_dgrad_recompute(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [*_norms_dgrad(ins, attrs), OutSpec("norm", ins[1].shape, ins[1].dtype)]


def _norm_again(op: Op, again: Op) -> str:
    """The norm that `_norms_rematerialize` computes is a function of what the backward op reads."""
    return f"{op.kind}_recompute" if again.kind == "rmsnorm" and again.ins == op.ins[1:3] else ""


def _without_weights(op: Op, read: Sequence[bool]) -> Op:
    return op if any(read[2:]) else op.changed(kind="norm_add_rmsnorm_dgrad", outs=op.outs[:2])


def _norm_op(kind: str, infer: Any, flops: int, **fields: Any) -> OpDef:
    return OpDef(
        kind=kind,
        infer=infer,
        attrs={"eps": float, "offset": (float, 0.0)},
        reference=f"{_REFERENCE}:{kind}",
        flops=lambda op: flops * op.ins[0].size,
        **fields,
    )


def _in_place(op: Op) -> Mapping[int, int]:
    return {0: 0, 1: 4}


OPS: tuple[OpDef, ...] = (
    _norm_op("norm_add_rmsnorm", _norms, 10, vjp=_norms_vjp, rewrites=Rewrites(rematerialize=_norms_rematerialize)),
    _norm_op(
        "norm_add_rmsnorm_bwd",
        _norms_bwd,
        20,
        may_overwrite=_in_place,
        rewrites=Rewrites(recompute_kind=_norm_again, narrowed=_without_weights),
    ),
    _norm_op("norm_add_rmsnorm_bwd_recompute", _norms_bwd_recompute, 21, may_overwrite=_in_place),
    _norm_op(
        "norm_add_rmsnorm_dgrad",
        _norms_dgrad,
        16,
        may_overwrite=_in_place,
        rewrites=Rewrites(recompute_kind=_norm_again),
    ),
    _norm_op("norm_add_rmsnorm_dgrad_recompute", _norms_dgrad_recompute, 17, may_overwrite=_in_place),
    OpDef(
        kind="scale",
        infer=_scale,
        attrs={"factor": float},
        reference=f"{_REFERENCE}:scale",
        vjp=_scale_vjp,
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: op.ins[0].size,
    ),
    OpDef(
        kind="geglu",
        infer=_geglu,
        reference=f"{_REFERENCE}:geglu",
        vjp=_geglu_vjp,
        flops=lambda op: 9 * op.outs[0].size,
    ),
    OpDef(
        kind="geglu_bwd",
        infer=_geglu_bwd,
        reference=f"{_REFERENCE}:geglu_bwd",
        may_overwrite=lambda op: {0: 1},
        flops=lambda op: 20 * op.ins[0].size,
    ),
)
