"""References of the ops in plain torch. They define what kernels are tested against, and run on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.reference.rounding import TORCH_DTYPES, store


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2, computed in fp32 and rounded once."""
    return x.float().relu().square().to(x.dtype)


def sgd(
    clip_coef: Tensor,
    lr: Tensor,
    step: Tensor,
    seed: Tensor,
    grad: Tensor,
    master: Tensor,
    velocity: Tensor,
    *,
    momentum: float,
    weight_decay: float,
    stream: int,
    work_dtype: str | None,
    firsts: Sequence[int] = (0,),
) -> tuple[Tensor, ...]:
    """New master, velocity and working copy. A bf16 master is rounded stochastically; inputs are never written to.

    `firsts`: where each output begins in the whole, because the random bits depend on the place of an element.
    """
    new_master, new_velocity = master, velocity
    if torch.isfinite(clip_coef):
        moving = momentum * velocity.float() + clip_coef * grad.float()
        moved = master.float() - lr * (moving + weight_decay * master.float())
        new_velocity = moving.to(velocity.dtype)
        new_master = store(moved, master.dtype, seed=int(seed), stream=stream, step=int(step), first=firsts[0])
    work = () if work_dtype is None else (new_master.to(TORCH_DTYPES[work_dtype]),)
    return new_master, new_velocity, *work
