"""An adapter for Surogate: a trained factor for each output of a projection, y = l * (W x), as in (IA)^3 of PEFT"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    AdapterContext,
    Init,
    NoOptions,
    Op,
    OpDef,
    OutSpec,
    Program,
    ProgramError,
    Scalars,
    Value,
    provides,
)
from surogate_core.api.peft import PeftFormat

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"ops": 1, "adapters": 1}
FACTORS = ".ia3_l"

# -------------------------------------------------------------------------------------------------------------- the op


def infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """Return label, shape and dtype of each output."""
    if len(ins) != 2 or ins[1].shape != (ins[0].shape[-1], 1):
        raise ProgramError(f"acme_toy_scale takes y [T, N] and l [N, 1], got {ins}")
    return [OutSpec("acme_toy", ins[0].shape, ins[0].dtype)]


def acme_toy_scale(y: Tensor, factors: Tensor) -> Tensor:
    """The definition of the op, which runs on a CPU."""
    return (y.float() * factors.float().flatten()).to(y.dtype)


SCALE = OpDef(
    kind="acme_toy_scale",
    infer=infer,
    reference=f"{__name__}:acme_toy_scale",
    flops=lambda op: op.ins[0].size,
    math=lambda op: "fp32",
)

# ------------------------------------------------------------------------------------------------------------ in a run


def apply(forward: Program, scalars: Scalars, context: AdapterContext[NoOptions]) -> Program:
    """Scale the outputs of products in blocks whose weight is one tensor of the checkpoint: o and down.

    The factors are one at first, so the model starts as its base. Values that are added have the label of the output,
    with which they are recomputed.
    """
    b = context.builder
    modules = {w.param: w.tensors[0].name.removesuffix(".weight") for w in context.weights if len(w.tensors) == 1}
    ops: list[Op] = []
    for op in forward.ops:
        if op.kind != "linear" or op.block < 0 or op.ins[1].name not in modules:
            ops.append(op)
            continue
        weight, (y,) = op.ins[1], op.outs
        with b.record("forward", op.block) as emitted:
            name, shape = modules[weight.name] + FACTORS, (weight.shape[0], 1)
            factors = b.param(name, shape, Init(kind="ones"), context.precision.adapter)
            product = b.apply("linear", *op.ins, label=y.label, **op.attrs)
            b.emit("acme_toy_scale", product, factors, outs=[y])
        ops += emitted
    return replace(forward, ops=tuple(ops))


# ------------------------------------------------------------------------------------------------------------ in files


def merged(weight: Tensor, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return the weight that computes the same without the adapter."""
    return weight * parts[FACTORS]


FORMAT = PeftFormat(
    peft_type="IA3",
    parts={FACTORS: FACTORS},
    merged=merged,
    values={"feedforward_modules": ([],)},  # their inputs would be scaled
    inert=("init_ia3_weights",),
)

SUROGATE_EXAMPLES = {"adapter acme_toy": [{"learning_rate": 0.3}]}
"""Options for `surogate plugins test`: few factors need large steps."""

surogate_ops = provides([SCALE])
surogate_adapters = provides(
    [
        FORMAT.adapter(
            name="acme_toy",
            summary="a trained factor for each output of a projection, in PEFT's format",
            options=NoOptions,
            apply=apply,
            trainable=lambda param, stored, options: stored is None,
        )
    ]
)
