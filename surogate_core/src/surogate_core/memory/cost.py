"""Estimated time of a program on a device: the sum of an estimate per op, from FLOPs, bytes and launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..program.op import Op, Program, Signature
from ..program.value import Value

if TYPE_CHECKING:
    from ..api import DeviceInfo, OpDef


@dataclass(frozen=True)
class Cost:
    """The work of a sequence of ops.

    flops            floating-point operations
    bytes            bytes read and written
    seconds          estimated time
    comm_seconds     time of the collectives, which overlap with the other ops
    waiting_seconds  the part of `seconds` that waits for collectives
    """

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    comm_seconds: float = 0.0
    waiting_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, count: int) -> Cost:
        """Return the cost of the same work `count` times."""
        return Cost(*(getattr(self, f.name) * count for f in fields(self)))


def op_cost(op: Op, definition: OpDef, device: DeviceInfo) -> Cost:
    """Return the cost of an op: a launch, the longest of its arithmetic, traffic and communication, and its passes."""
    flops, passes = definition.flops(op), definition.passes(op)
    traffic = definition.traffic(op) if definition.traffic else _traffic(op)
    arithmetic = flops / (arithmetic_rate(op, definition, device) * definition.efficiency(op))
    longest = max(arithmetic, traffic / device.bandwidth, definition.link(op) / device.link_bandwidth)
    return Cost(flops, traffic + passes, device.launch_seconds + longest + passes / device.bandwidth)


def arithmetic_rate(op: Op, definition: OpDef, device: DeviceInfo) -> float:
    """Return the FLOP/s of `device` that price an op (`OpDef.math`). A device without that rate runs it in fp32."""
    dtypes = (v.dtype for v in op.ins if v.dtype in device.flops)
    rate = definition.math(op) if definition.math else next(dtypes, "fp32")
    return device.flops.get(rate, device.flops["fp32"])


class OpCosts:
    """The costs of ops on a device. Ops of equal signature cost the same, so each signature is priced once."""

    def __init__(self, ops: Mapping[str, OpDef], device: DeviceInfo) -> None:
        self._ops = ops
        self._device = device
        self._costs: dict[Signature, Cost] = {}

    def __call__(self, op: Op) -> Cost:
        """Return `op_cost` of `op`."""
        if op.signature not in self._costs:
            self._costs[op.signature] = op_cost(op, self._ops[op.kind], self._device)
        return self._costs[op.signature]


def program_cost(program: Program, ops: Mapping[str, OpDef], device: DeviceInfo) -> Cost:
    """Return the cost of a program. Ops of a lane run one after another; the lanes overlap.

    A collective starts when all ops before it are done. Ops that use its values wait for it, as does the end of the
    program. The bandwidth and the multiprocessors that it takes from concurrent ops are not counted.
    """
    flops = nbytes = 0
    seconds = comm_seconds = free = clock = 0.0
    costs = OpCosts(ops, device)
    done: dict[Value, float] = {}
    for op in program.ops:
        cost = costs(op)
        flops += cost.flops
        nbytes += cost.bytes
        if op.lane == "compute":
            if done:
                clock = max([clock, *(done[v] for v in (*op.ins, *op.outs) if v in done)])
            clock += cost.seconds
            seconds += cost.seconds
        else:
            free = max(free, clock) + cost.seconds
            done.update(dict.fromkeys((*op.ins, *op.outs), free))
            comm_seconds += cost.seconds
    waiting = max(clock, free) - seconds
    return Cost(flops, nbytes, seconds + waiting, comm_seconds, waiting)


def _traffic(op: Op) -> int:
    reads = sum(v.nbytes for v in op.ins)
    return reads + sum(v.nbytes * (2 if i in op.accumulate else 1) for i, v in enumerate(op.outs))
