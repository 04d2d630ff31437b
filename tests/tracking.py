"""A recipe that keeps a state: a history of maxima that every product's input reads and every micro-step writes.

And a recipe that notes which `step` and `lr` a micro-step sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from surogate_core.api import Init, LowerContext, Op, OpDef, OutSpec, Program, Programs, RecipeDef, Value
from surogate_core.program.builder import Builder

HISTORY, NOTED = "amax_history", "noted_scalars"


def scaled(x: Tensor, history: Tensor) -> Tensor:
    """x, scaled by what the history holds."""
    return x * (1 + 0.01 * history[1])


def tracked(x: Tensor, history: Tensor) -> Tensor:
    """Return the largest element so far, followed by the previous maxima."""
    return torch.stack([torch.maximum(history[0], x.abs().max().float()), history[0]])


def noted(step: Tensor, lr: Tensor) -> Tensor:
    return torch.stack([step.float(), lr])


OPS = {
    op.kind: op
    for op in (
        OpDef(
            kind="toy_scaled",
            infer=lambda ins, attrs: [OutSpec("norm", ins[0].shape, ins[0].dtype)],
            reference="tracking:scaled",
        ),
        OpDef(
            kind="toy_tracked",
            infer=lambda ins, attrs: [OutSpec("history", (2,), "fp32")],
            reference="tracking:tracked",
        ),
        OpDef(kind="toy_noted", infer=lambda ins, attrs: [OutSpec("noted", (2,), "fp32")], reference="tracking:noted"),
    )
}

Before = Callable[[Op, Program, Builder], Op]


def _state(builder: Builder, name: str) -> Value:
    found = [v for v in builder.declared if v.name == name]
    return found[0] if found else builder.state(name, (2,), "fp32", Init(kind="zeros"))


def _track(op: Op, program: Program, builder: Builder) -> Op:
    history = _state(builder, HISTORY)
    x = builder.apply("toy_scaled", op.ins[0], history)
    builder.emit("toy_tracked", op.ins[0], history, outs=[history])
    return replace(op, ins=(x, *op.ins[1:]))


def _note(op: Op, program: Program, builder: Builder) -> Op:
    step, lr = (next(v for v in builder.declared if v.name == name) for name in ("step", "lr"))
    if program.name != "evaluate":
        builder.emit("toy_noted", step, lr, outs=[_state(builder, NOTED)])
    return op


def _before_the_first_product(recipe: RecipeDef, change: Before) -> RecipeDef:
    """`recipe`, whose lowered programs begin with what `change` emits before their first linear op."""

    def changed(lowered: Program, builder: Builder) -> Program:
        at = next(i for i, op in enumerate(lowered.ops) if op.kind == "linear")
        with builder.record("forward", lowered.ops[at].block) as emitted:
            product = change(lowered.ops[at], lowered, builder)
        old, new = lowered.ops[at].ins[0], product.ins[0]
        later = [  # the gradient of the weights reads what the product read
            replace(op, ins=tuple(new if v is old else v for v in op.ins)) if op.kind == "linear_wgrad" else op
            for op in lowered.ops[at + 1 :]
        ]
        return replace(lowered, ops=(*lowered.ops[:at], *emitted, product, *later))

    def lower(family: Programs, context: LowerContext) -> Programs:
        family, b = recipe.lower(family, context), context.builder
        return replace(family, micro=changed(family.micro, b), evaluate=changed(family.evaluate, b))

    return replace(recipe, lower=lower)


def tracking(recipe: RecipeDef) -> RecipeDef:
    return _before_the_first_product(recipe, _track)


def noting(recipe: RecipeDef) -> RecipeDef:
    return _before_the_first_product(recipe, _note)
