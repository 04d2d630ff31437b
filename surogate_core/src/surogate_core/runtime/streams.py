"""Order between the streams of a program: events fork side streams from the main one and join them again.

In a captured program the events become edges of the graph, so collectives and copies overlap with the other launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..api import Launch
from ..program.lanes import lane_order
from ..program.op import Lane, Op


def order_streams(
    ops: Sequence[Op],
    launches: Sequence[tuple[Launch, ...]],
    streams: Mapping[Lane, Any],
    event: Callable[[], Any] = torch.cuda.Event,
) -> tuple[tuple[Launch, ...], ...]:
    """Return the launches of each op, with events that order the streams of the lanes as `lane_order` says.

    All side streams are joined at the end of the program, and also where a graph ends within the program, because an
    event cannot connect two graphs: before an op that has launches to skip.
    """
    compute, waits = streams["compute"], lane_order(ops).waits
    ends: dict[int, Any] = {}  # of ops on side lanes since the graph began
    last: dict[Lane, Any] = {}
    result: list[tuple[Launch, ...]] = []
    for index, (op, own) in enumerate(zip(ops, launches, strict=True)):
        stream = streams[op.lane]
        before = [(stream.wait_event, (ends[i],)) for i in waits.get(index, ()) if i in ends]
        after = []
        if op.lane != "compute":
            fork, ends[index] = event(), event()
            last[op.lane] = ends[index]
            before = [(fork.record, (compute,)), (stream.wait_event, (fork,)), *before]
            after = [(ends[index].record, (stream,))]
        elif last and any(launch.labels_above >= 0 for launch in own):
            before = [(compute.wait_event, (end,)) for end in last.values()]
            ends, last = {}, {}
        result.append((*map(Launch, before), *own, *map(Launch, after)))
    if last:
        result[-1] = (*result[-1], *(Launch((compute.wait_event, (end,))) for end in last.values()))
    return tuple(result)
