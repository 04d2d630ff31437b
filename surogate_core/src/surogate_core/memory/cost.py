"""How long a program takes on a device, from FLOPs and bytes: a roofline per op, summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..program.op import Op, Program

if TYPE_CHECKING:
    from ..api import DeviceInfo, OpDef


@dataclass(frozen=True)
class Cost:
    """Work of a run of ops: floating-point operations, bytes read and written, seconds."""

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.seconds + other.seconds)

    def times(self, count: int) -> Cost:
        """The same work `count` times."""
        return Cost(self.flops * count, self.bytes * count, self.seconds * count)


def op_cost(op: Op, definition: OpDef, device: DeviceInfo) -> Cost:
    """An op takes the longest of its arithmetic, its traffic and the floor of a launch."""
    flops = definition.flops(op)
    traffic = definition.traffic(op) if definition.traffic else _traffic(op)
    operand = next((v.dtype for v in op.ins if v.dtype in device.flops), "fp32")
    rate = device.flops.get(operand, device.flops["fp32"])
    return Cost(flops, traffic, max(flops / rate, traffic / device.bandwidth, device.launch_seconds))


def program_cost(program: Program, ops: Mapping[str, OpDef], device: DeviceInfo) -> Cost:
    """The sum over the ops of a program."""
    total = Cost()
    for op in program.ops:
        total = total + op_cost(op, ops[op.kind], device)
    return total


def _traffic(op: Op) -> int:
    reads = sum(v.nbytes for v in op.ins)
    return reads + sum(v.nbytes * (2 if i in op.accumulate else 1) for i, v in enumerate(op.outs))
