"""Ops of these models.

scale (x [...]; factor) -> x * factor            in fp32, rounded once
geglu (gate_up [T, 2F]) -> gelu(gate) * up       columns are the halves [gate; up]; gelu by its tanh formula
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, ProgramError, RowWise, Value

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


OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="scale",
        infer=_scale,
        attrs={"factor": float},
        reference=f"{_REFERENCE}:scale",
        vjp=_scale_vjp,
        may_overwrite=lambda op: {0: 0},
        flops=lambda op: op.ins[0].size,
        row_wise=lambda op: RowWise(ins=(0,), outs=(0,)),
    ),
    OpDef(
        kind="geglu",
        infer=_geglu,
        reference=f"{_REFERENCE}:geglu",
        vjp=_geglu_vjp,
        flops=lambda op: 9 * op.outs[0].size,
        row_wise=lambda op: RowWise(ins=(0,), outs=(0,)),
    ),
    OpDef(
        kind="geglu_bwd",
        infer=_geglu_bwd,
        reference=f"{_REFERENCE}:geglu_bwd",
        may_overwrite=lambda op: {0: 1},
        flops=lambda op: 20 * op.ins[0].size,
        row_wise=lambda op: RowWise(ins=(0, 1), outs=(0,)),
    ),
)
