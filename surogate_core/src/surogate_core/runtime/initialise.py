"""Fills params and states from their `Init`, the same whatever the order, the plan or the precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from ..errors import ProgramError
from ..program.value import Init, Value
from .filling import Upload, fill

_CALL = 1 << 24  # elements of a run of the generator: a normal draw ends with its own last 16 numbers
_CHUNK = 1 << 20  # elements drawn at once: 4 MiB, which stay in a core's cache
_LEAST = 16  # elements that a normal draw takes at once: fewer are drawn in another way, to other bits


def initialise(
    values: Iterable[Value], view: Callable[[Value], Tensor], seed: int, zero_projections: bool = False
) -> None:
    """Write every value's initial content into `view(value)`; values without an `init` are left as they are.

    A random draw is made in fp32 by a generator of its own, seeded from (seed, name), then cast: a param starts the
    same whatever else the model has, and on however many cores. `zero_projections` zeroes the matrices that write to
    the residual stream. Raises ProgramError for a param without an `init`.
    """
    drawn: list[tuple[Tensor, Init, int]] = []
    for value in values:
        init = value.init
        if init is None:
            if value.role == "param":
                raise ProgramError(f"{value!r} has no init: it can only be loaded")
        elif init.kind == "zeros" or (zero_projections and init.residual_projection):
            view(value).zero_()
        elif init.kind in ("normal", "uniform"):
            drawn.append((view(value), init, crc32(f"{seed}/{value.name}".encode())))
        else:
            view(value).fill_(1.0 if init.kind == "ones" else init.value)
    drawn.sort(key=lambda job: -job[0].numel())  # the largest first, or they end last, alone
    fill(partial(_draw, *job) for job in drawn)


def _draw(target: Tensor, init: Init, seed: int, upload: Upload) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat, memory = target.view(-1), torch.empty(_CHUNK + _LEAST, dtype=torch.float32)
    for start, stop in chunks(flat.numel()):
        chunk = memory[: stop - start]
        if init.kind == "normal":
            chunk.normal_(0.0, init.std, generator=generator)
        else:
            chunk.uniform_(-init.bound, init.bound, generator=generator)
        upload.copy(flat[start:stop], chunk)


def chunks(n: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the parts in which `n` numbers are drawn, with the bits of draws of _CALL numbers at once."""
    for call in range(0, n, _CALL):
        end, start = min(call + _CALL, n), call
        while start < end:
            stop = end if end - start < _CHUNK + _LEAST else start + _CHUNK
            yield start, stop
            start = stop
