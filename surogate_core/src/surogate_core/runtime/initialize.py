"""Fills params and states according to their `Init`, independently of order, plan and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from ..errors import ProgramError
from ..program.contents import drawn
from ..program.value import Init, Value
from .filling import Upload, fill

_CALL = 1 << 24  # elements per notional draw; torch generates the last 16 numbers of a normal draw separately
_CHUNK = 1 << 20  # elements per actual draw: 4 MiB, which fit in the cache of a core
_LEAST = 16  # smallest normal draw: torch uses a different algorithm for fewer elements


def initialize(
    values: Iterable[Value], view: Callable[[Value], Tensor], seed: int, zero_projections: bool = False
) -> None:
    """Write the initial contents of every value to `view(value)`. Values without an `init` are not changed.

    Random values are drawn in fp32 and then cast, with a separate generator per value that is seeded with (seed, name).
    A param therefore starts the same whatever other params the model has, on any number of cores. `zero_projections`
    sets the matrices that write to the residual stream to zero. Raises ProgramError for a param without an `init`.
    """
    jobs: list[tuple[Tensor, Init, int]] = []
    for value in values:
        init = value.init
        if init is None:
            if value.role == "param":
                raise ProgramError(f"{value!r} has no init, so it must be loaded from a checkpoint")
        elif init.kind == "zeros" or (zero_projections and init.residual_projection):
            view(value).zero_()
        elif drawn(init):
            jobs.append((view(value), init, crc32(f"{seed}/{value.name}".encode())))
        elif init.kind == "values":
            rows = torch.tensor(init.values, dtype=torch.float64)
            view(value).copy_(rows.view(-1, *(1 for _ in value.shape[1:])).expand(value.shape))
        else:
            view(value).fill_(1.0 if init.kind == "ones" else init.value)
    jobs.sort(key=lambda job: -job[0].numel())  # largest first: a large one at the end would run alone
    fill(partial(_draw, *job) for job in jobs)


def draw_zeros(values: Iterable[Value], view: Callable[[Value], Tensor], std: float, seed: int) -> None:
    """Draw those of `values` that are zero now from a normal distribution, as `initialise` would."""
    zeros = {v.name: v for v in values if v.init and not view(v).any()}
    normal = [replace(v, init=replace(v.init, kind="normal", std=std)) for v in zeros.values() if v.init]
    initialize(normal, lambda v: view(zeros[v.name]), seed)


def _draw(target: Tensor, init: Init, seed: int, upload: Upload) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat, memory = target.view(-1), torch.empty(_CHUNK + _LEAST, dtype=torch.float32)
    for start, stop in chunks(flat.numel()):
        chunk = memory[: stop - start]
        if init.kind == "normal":
            chunk.normal_(0.0, init.std, generator=generator)
        elif init.kind == "log_uniform":
            chunk.uniform_(init.low, init.high, generator=generator)
            chunk.copy_(chunk.double().log_())  # in fp64: the same bits with any instructions of the CPU
        else:
            chunk.uniform_(-init.bound, init.bound, generator=generator)
        upload.copy(flat[start:stop], chunk)


def chunks(n: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the draws for `n` numbers. Their bits equal those of single draws of _CALL numbers."""
    for call in range(0, n, _CALL):
        end, start = min(call + _CALL, n), call
        while start < end:
            stop = end if end - start < _CHUNK + _LEAST else start + _CHUNK
            yield start, stop
            start = stop
