"""Order between the lanes of a program: events that fork the side stream from the main one and join it again.

Inside a captured graph they become its edges, so a whole program, collectives included, is one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..api import Call
from ..program.op import Op
from ..program.value import Value


def in_lanes(
    ops: Sequence[Op], calls: Sequence[Call], compute: Any, comm: Any, event: Callable[[], Any] = torch.cuda.Event
) -> tuple[Call, ...]:
    """`calls`, one for each op as before, with what orders the streams `compute` and `comm`.

    An op of the lane "comm" begins when everything before it on `compute` is done. An op of the lane "compute" that
    touches one of its values waits for it, and so does what comes after the program.
    """
    ends: dict[Value, Any] = {}
    last: Any = None
    sequences: list[list[Call]] = []
    for op, call in zip(ops, calls, strict=True):
        values = (*op.ins, *op.outs)
        if op.lane == "comm":
            fork, last = event(), event()
            sequences.append([(fork.record, (compute,)), (comm.wait_event, (fork,)), call, (last.record, (comm,))])
            ends |= dict.fromkeys(values, last)
        else:
            waits = dict.fromkeys(ends.pop(v) for v in values if v in ends)
            sequences.append([*((compute.wait_event, (end,)) for end in waits), call])
    if last is not None:
        sequences[-1].append((compute.wait_event, (last,)))
    return tuple(calls[0] if len(calls) == 1 else (_in_turn, tuple(calls)) for calls in sequences)


def _in_turn(*calls: Call) -> None:
    for function, arguments in calls:
        function(*arguments)
