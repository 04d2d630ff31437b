"""Order between the lanes of a program: events that fork the side stream from the main one and join it again.

Inside a captured graph they become its edges, so collectives are part of the graph that they overlap with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..api import Launch
from ..program.op import Op
from ..program.value import Value


def order_streams(
    ops: Sequence[Op],
    parts: Sequence[tuple[Launch, ...]],
    compute: Any,
    comm: Any,
    event: Callable[[], Any] = torch.cuda.Event,
) -> tuple[tuple[Launch, ...], ...]:
    """The parts of each op, with what orders the streams `compute` and `comm` around them.

    An op of the lane "comm" begins when everything before it on `compute` is done. An op of the lane "compute" that
    touches one of its values waits for it. Nothing is left under way behind the program, nor where a graph ends within
    it, since an event does not reach from one graph into another: before an op of which batches may leave out parts.
    """
    ends: dict[Value, Any] = {}
    last: Any = None
    result: list[tuple[Launch, ...]] = []
    for op, its in zip(ops, parts, strict=True):
        values = (*op.ins, *op.outs)
        if op.lane == "comm":
            fork, last = event(), event()
            before, behind = [(fork.record, (compute,)), (comm.wait_event, (fork,))], [(last.record, (comm,))]
            ends |= dict.fromkeys(values, last)
        elif last is not None and any(part.above >= 0 for part in its):
            before, behind = [(compute.wait_event, (last,))], []
            last, ends = None, {}
        else:
            before = [(compute.wait_event, (end,)) for end in dict.fromkeys(ends.pop(v) for v in values if v in ends)]
            behind = []
        result.append((*map(Launch, before), *its, *map(Launch, behind)))
    if last is not None:
        result[-1] = (*result[-1], Launch((compute.wait_event, (last,))))
    return tuple(result)
