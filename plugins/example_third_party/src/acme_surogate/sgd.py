"""SGD with momentum: one op for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Init, OpDef, OptimizerDef, OutSpec, UpdateContext, Value


class SGDOptions(BaseModel):
    """Keys of the YAML file; the prefix keeps them apart from other plugins'."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acme_momentum: float = Field(0.9, ge=0, lt=1, description="Decay of the velocity.")


def update(context: UpdateContext[SGDOptions]) -> None:
    """velocity = momentum * velocity + gradient; param -= lr * (velocity + decay * param)."""
    b, scalars = context.builder, context.scalars
    for p in context.params:
        dtype = context.precision.optimizer_state  # the key `optimizer_state_dtype`
        velocity = b.state(f"acme_sgd.velocity.{p.name}", p.param.shape, dtype, Init(kind="zeros"))
        work_copy = () if p.param is p.master else (p.param,)
        b.emit(
            "acme_sgd",
            *(context.clip_coef, scalars.lr, scalars.step, scalars.seed),
            *(p.grad, p.master, velocity),
            outs=[p.master, velocity, *work_copy],
            momentum=context.options.acme_momentum,
            weight_decay=0.0 if p.kind == "vector" else context.weight_decay,
            stream=crc32(p.name.encode()),
            work_dtype=p.param.dtype if work_copy else None,
        )


def infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """The new master and velocity, and the working copy of a param whose master is separate."""
    master, velocity = ins[5], ins[6]
    outs = [OutSpec("master", master.shape, master.dtype), OutSpec("velocity", velocity.shape, velocity.dtype)]
    if attrs["work_dtype"]:
        outs.append(OutSpec("work", master.shape, attrs["work_dtype"]))
    return outs


SGD_OP = OpDef(
    kind="acme_sgd",
    infer=infer,
    attrs={"momentum": float, "weight_decay": float, "stream": int, "work_dtype": str | None},
    reference="acme_surogate.reference:sgd",
    flops=lambda op: 6 * op.ins[4].size,
    positioned=True,
)

SGD = OptimizerDef(
    name="acme_sgd",
    summary="SGD with momentum",
    options=SGDOptions,
    update=update,
    granularity=lambda p: 1,
)
