"""An op as several ranks run it that divide its values: each has a part of them, and of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, cat

from surogate_core.program.op import Op
from surogate_core.program.shards import part_size
from surogate_core.program.value import Shard, Value

Contents = Mapping[Value, Tensor]


def divided(
    op: Op,
    contents: Contents,
    parts: int,
    size: Callable[[Value], int] | None = None,
    padding: Callable[[Value], float] = lambda value: 0,
) -> Iterator[tuple[Op, Contents]]:
    """Yield the op of each rank, and what its inputs hold. Scalars stay whole.

    size     elements of a part of a value; None: `part_size` of its own
    padding  of a value
    """
    of_rank = {
        v: replace(v, shape=((size or (lambda v: part_size(v.size, parts)))(v),), shard=Shard(v.shape, parts))
        for v in (*op.ins, *op.outs)
        if v.shape
    }
    for rank in range(parts):
        held = {v: x for v, x in contents.items() if v not in of_rank}
        for value, x in contents.items():
            if part := of_rank.get(value):
                padded = F.pad(x.flatten(), (0, parts * part.size - x.numel()), value=padding(value))
                held[part] = padded.view(parts, -1)[rank].clone()
        yield op.on(of_rank), held


def placed(op: Op, contents: Contents, size: int, rank: int) -> tuple[Op, dict[Value, Tensor]]:
    """Return an op whose values of `size` elements are the last of `rank` + 1 parts, and what its inputs hold."""
    parts = {v: replace(v, shard=Shard((rank + 1, size), rank + 1)) for v in op.outs if v.size == size}
    return op.on(parts), {parts.get(v, v): x for v, x in contents.items()}


def joined(op: Op, ranks: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Value, Tensor]]:
    """Yield each output of `op` but scalars with what the outputs of all ranks hold of it."""
    for value, *parts in zip(op.outs, *ranks, strict=True):
        if value.shape:
            yield value, cat([x.flatten() for x in parts])[: value.size].view(value.shape)


def firsts(op: Op, rank: int) -> tuple[int, ...]:
    """Return the keyword `firsts` of the reference of a positioned op."""
    return tuple(v.first(rank) for v in op.outs)
