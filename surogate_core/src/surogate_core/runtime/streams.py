"""Order between the streams of a program: events fork the stream of collectives from the main one and join it again.

In a captured program the events become edges of the graph, so collectives overlap with the other launches of the graph.
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
    launches: Sequence[tuple[Launch, ...]],
    compute: Any,
    comm: Any,
    event: Callable[[], Any] = torch.cuda.Event,
) -> tuple[tuple[Launch, ...], ...]:
    """Return the launches of each op, with events that order the streams `compute` and `comm`.

    An op on the lane "comm" starts when everything before it on `compute` is done. An op on the lane "compute" that
    uses one of its values waits for it. All of `comm` is joined at the end of the program, and also where a graph ends
    within the program, because an event cannot connect two graphs: before an op that has launches to skip.
    """
    ends: dict[Value, Any] = {}
    last: Any = None
    result: list[tuple[Launch, ...]] = []
    for op, own in zip(ops, launches, strict=True):
        values = (*op.ins, *op.outs)
        if op.lane == "comm":
            fork, last = event(), event()
            before, after = [(fork.record, (compute,)), (comm.wait_event, (fork,))], [(last.record, (comm,))]
            ends |= dict.fromkeys(values, last)
        elif last is not None and any(launch.above >= 0 for launch in own):
            before, after = [(compute.wait_event, (last,))], []
            last, ends = None, {}
        else:
            before = [(compute.wait_event, (end,)) for end in dict.fromkeys(ends.pop(v) for v in values if v in ends)]
            after = []
        result.append((*map(Launch, before), *own, *map(Launch, after)))
    if last is not None:
        result[-1] = (*result[-1], Launch((compute.wait_event, (last,))))
    return tuple(result)
