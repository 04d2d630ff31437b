"""Fills params and states from their `Init`, the same whatever the order, the plan or the precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from zlib import crc32

import torch
from torch import Tensor

from ..errors import ProgramError
from ..program.value import Init, Value

_CHUNK = 1 << 24  # elements drawn at once: 64 MiB beside the buffer that is filled


def initialise(
    values: Iterable[Value], view: Callable[[Value], Tensor], seed: int, zero_projections: bool = False
) -> None:
    """Write every value's initial content into `view(value)`; values without an `init` are left as they are.

    A random draw is made in fp32 by a generator of its own, seeded from (seed, name), then cast: a param starts the
    same whatever else the model has. `zero_projections` zeroes the matrices that write to the residual stream.
    Raises ProgramError for a param without an `init`.
    """
    for value in values:
        if value.init is not None:
            _fill(view(value), value.init, crc32(f"{seed}/{value.name}".encode()), zero_projections)
        elif value.role == "param":
            raise ProgramError(f"{value!r} has no init: it can only be loaded")


def _fill(target: Tensor, init: Init, seed: int, zero_projections: bool) -> None:
    if init.kind == "zeros" or (zero_projections and init.residual_projection):
        target.zero_()
    elif init.kind in ("normal", "uniform"):
        generator = torch.Generator().manual_seed(seed)
        for part in torch.split(target.view(-1), _CHUNK):
            drawn = torch.empty(part.numel(), dtype=torch.float32)
            if init.kind == "normal":
                drawn.normal_(0.0, init.std, generator=generator)
            else:
                drawn.uniform_(-init.bound, init.bound, generator=generator)
            part.copy_(drawn)
    else:
        target.fill_(1.0 if init.kind == "ones" else init.value)
