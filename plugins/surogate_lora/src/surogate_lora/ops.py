"""What LoRA needs beside products: adding branches to columns of a fused projection, and taking such columns.

T tokens, N columns of a projection that may be several stored as one, n columns of a branch.

    lora_add      (base [T, N], branches [T, n]...; columns, scale)   -> y [T, N]: base + scale * branch at its columns
    lora_slice    (x [T, N]; column, width, scale, dtype)           -> scale * x[:, column : column + width]

And what a branch sees of its input, in training alone:

    lora_dropout  (x [T, K], micro_step, seed; rate, stream)        -> x / (1 - rate), or 0 where an element is dropped
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, Value
from surogate_core.errors import ProgramError


def _lora_add(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    base, *branches = ins
    rows, width = base.shape
    if len(attrs["columns"]) != len(branches):
        raise ProgramError(f"{len(branches)} branches for {len(attrs['columns'])} columns")
    ends = [(c, c + branch.shape[1]) for c, branch in zip(attrs["columns"], branches, strict=True)]
    if any(branch.shape[0] != rows for branch in branches):
        raise ProgramError(f"branches must have {rows} rows")
    if any(end > start for (_, end), (start, _) in pairwise([(0, 0), *ends, (width, width)])):
        raise ProgramError(f"branches at columns {ends} overlap, or leave the {width} of the base")
    return [OutSpec(base.label, base.shape, base.dtype)]


def _lora_add_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    (dy,) = grads
    assert dy is not None
    taken = (
        b.apply(
            "lora_slice",
            dy,
            label=f"d_{branch.label}",
            column=column,
            width=branch.shape[1],
            scale=op.attrs["scale"],
            dtype=branch.dtype,
        )
        for column, branch in zip(op.attrs["columns"], op.ins[1:], strict=True)
    )
    return dy, *taken


DRAWS = 1 << 16
"""Each element is dropped by 16 random bits, so a rate is a multiple of 1 / DRAWS."""


def dropped_draws(rate: float) -> int:
    """How many of DRAWS equally likely draws drop an element: what is nearest to `rate`, neither none nor all."""
    return min(max(round(rate * DRAWS), 1), DRAWS - 1)


def kept_scale(rate: float) -> float:
    """What elements that are kept are multiplied by: the mean stays exactly what it was."""
    return DRAWS / (DRAWS - dropped_draws(rate))


def _lora_dropout(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    x, micro_step, seed = ins
    if not 0 < attrs["rate"] < 1:
        raise ProgramError(f"drops a share between 0 and 1, not {attrs['rate']}")
    if (micro_step.shape, micro_step.dtype, seed.shape, seed.dtype) != ((), "int32", (), "int64"):
        raise ProgramError(f"micro_step is an int32 and seed an int64 scalar, not {micro_step!r} and {seed!r}")
    return [OutSpec(x.label, x.shape, x.dtype)]


def _lora_dropout_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """The same elements: the random bits are a function of micro_step, seed, stream and place."""
    (dy,) = grads
    assert dy is not None
    return b.apply("lora_dropout", dy, *op.ins[1:], label=f"d_{op.ins[0].label}", **op.attrs), None, None


def _lora_slice(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (x,) = ins
    column, width = attrs["column"], attrs["width"]
    if not 0 <= column < column + width <= x.shape[1]:
        raise ProgramError(f"columns {column} to {column + width} are not all in {x!r}")
    return [OutSpec(x.label, (x.shape[0], width), attrs["dtype"])]


def _branch_elements(op: Op) -> int:
    return sum(v.size for v in (op.ins[1:] if op.kind == "lora_add" else op.outs))


OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="lora_add",
        infer=_lora_add,
        vjp=_lora_add_vjp,
        reference="surogate_lora.reference:lora_add",
        flops=lambda op: 2 * _branch_elements(op),
    ),
    OpDef(
        kind="lora_slice",
        infer=_lora_slice,
        reference="surogate_lora.reference:lora_slice",
        flops=_branch_elements,
        traffic=lambda op: op.outs[0].nbytes + op.outs[0].size * (op.ins[0].nbytes // op.ins[0].size),
    ),
    OpDef(
        kind="lora_dropout",
        infer=_lora_dropout,
        vjp=_lora_dropout_vjp,
        reference="surogate_lora.reference:lora_dropout",
        flops=lambda op: op.outs[0].size,
        training_only=True,
        always_recomputed=True,
    ),
)
