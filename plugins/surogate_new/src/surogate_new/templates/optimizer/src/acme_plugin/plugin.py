"""An optimizer for Surogate: every element moves by the learning rate, against the sign of its momentum"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Init, OpDef, OptimizerDef, OutSpec, UpdateContext, Value, provides

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"ops": 1, "optimizers": 1}


class Options(BaseModel):
    """Keys of the YAML file. The prefix keeps them apart from those of other plugins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    acme_toy_momentum: float = Field(0.9, ge=0, lt=1, description="Decay of the mean of gradients.")


def update(context: UpdateContext[Options]) -> None:
    """Emit the update of each param. What changes from step to step is a value, everything else an attribute."""
    b, scalars = context.builder, context.scalars
    for p in context.params:
        dtype = context.precision.optimizer_state  # the key `optimizer_state_dtype`
        mean = b.state(f"acme_toy.mean.{p.name}", p.param.shape, dtype, Init(kind="zeros"))
        copies = () if p.param is p.master else (p.param,)  # the weight itself, if its master is a state of its own
        b.emit(
            "acme_toy_update",
            *(context.clip_coef, scalars.lr, scalars.step, scalars.seed),
            *(p.grad, p.master, mean),
            outs=[p.master, mean, *copies],
            momentum=context.options.acme_toy_momentum,
            weight_decay=0.0 if p.kind == "vector" else context.weight_decay,
            stream=crc32(p.name.encode()),
            copy_dtype=p.param.dtype if copies else None,
        )


def infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    master, mean = ins[5], ins[6]
    copies = [OutSpec("copy", master.shape, attrs["copy_dtype"])] if attrs["copy_dtype"] else []
    return [OutSpec("master", master.shape, master.dtype), OutSpec("mean", mean.shape, mean.dtype), *copies]


def acme_toy_update(
    clip_coef: Tensor,
    lr: Tensor,
    step: Tensor,
    seed: Tensor,
    grad: Tensor,
    master: Tensor,
    mean: Tensor,
    *,
    momentum: float,
    weight_decay: float,
    stream: int,
    copy_dtype: str | None,
) -> tuple[Tensor, ...]:
    """The reference: what the op computes. It returns new tensors. A step with a `clip_coef` that is not finite is
    skipped: nothing changes."""
    import torch

    from surogate_core.reference.rounding import TORCH_DTYPES, store

    new_master, new_mean = master.clone(), mean.clone()
    if torch.isfinite(clip_coef):
        moving = momentum * mean.float() + (1 - momentum) * clip_coef * grad.float()
        moved = master.float() - lr * (moving.sign() + weight_decay * master.float())
        new_mean = moving.to(mean.dtype)
        new_master = store(moved, master.dtype, seed=int(seed), stream=stream, step=int(step))  # rounds stochastically
    copies = () if copy_dtype is None else (new_master.to(TORCH_DTYPES[copy_dtype]),)
    return new_master, new_mean, *copies


UPDATE = OpDef(
    kind="acme_toy_update",
    infer=infer,
    attrs={"momentum": float, "weight_decay": float, "stream": int, "copy_dtype": str | None},
    reference=f"{__name__}:acme_toy_update",
    flops=lambda op: 6 * op.ins[4].size,
)

surogate_ops = provides([UPDATE])
surogate_optimizers = provides(
    [OptimizerDef(name="acme_toy", summary="the sign of the momentum", options=Options, update=update)]
)
