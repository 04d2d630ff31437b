"""Estimated time of a program on a device: the sum of an estimate per op, from FLOPs, bytes and launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ..machine.links import Route
from ..machine.prices import arithmetic_share, moved_between, prices
from ..program.lanes import lane_order
from ..program.op import Lane, Op, Program, Signature

if TYPE_CHECKING:
    from ..api import DeviceInfo, KernelDef, OpDef

COPIES: tuple[Lane, ...] = ("to_host", "to_device")
KernelOf = Callable[[Op], "KernelDef | None"]
"""Returns the kernel that runs an op; None: the torch reference does."""


@dataclass(frozen=True)
class Cost:
    """The work of a sequence of ops.

    flops              floating-point operations
    bytes              bytes read and written
    seconds            estimated time
    comm_seconds       time of the collectives, which overlap with the other ops
    waiting_seconds    the part of `seconds` that waits for side lanes, or for the link to values on the host
    copy_seconds       time of the link to the host: of copies, the longer of both directions, and of ops that use it
    attention_seconds  the part of `seconds` of attention (`OpDef.attention`)
    product_seconds    the part of `seconds` of other ops whose arithmetic takes longer than their traffic
    """

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    comm_seconds: float = 0.0
    waiting_seconds: float = 0.0
    copy_seconds: float = 0.0
    attention_seconds: float = 0.0
    product_seconds: float = 0.0

    @property
    def memory_seconds(self) -> float:
        """The part of `seconds` of ops whose traffic takes longest."""
        return self.seconds - self.attention_seconds - self.product_seconds - self.waiting_seconds

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, count: int) -> Cost:
        """Return the cost of the same work `count` times."""
        return Cost(*(getattr(self, f.name) * count for f in fields(self)))


def op_cost(
    op: Op, definition: OpDef, device: DeviceInfo, kernel: KernelDef | None = None, route: Route | None = None
) -> Cost:
    """Return the cost of an op: a launch, the longest of its arithmetic, traffic and communication, and its passes.

    `kernel` runs it; None: the torch reference does.
    `route` is the way of collectives; None: the link of the device, without latency.
    """
    if op.lane in COPIES:
        copied = sum(v.nbytes for v in op.outs)
        return Cost(0, copied, device.launch_seconds + copied / device.host_bandwidth)
    flops, passes = definition.flops(op), definition.passes(op)
    traffic = definition.traffic(op) if definition.traffic else _traffic(op)
    rate = arithmetic_rate(op, definition, device, kernel)
    if kernel and kernel.arithmetic:
        share = kernel.arithmetic[1]
    else:
        share = arithmetic_share(op, definition, flops, rate, device)
    arithmetic = flops / (rate * share) if flops else 0.0
    bandwidth = device.bandwidth * ((kernel and kernel.memory_efficiency) or prices(device).memory)
    moved = max(traffic, moved_between(op, definition, flops, device))
    longest = max(arithmetic, moved / bandwidth, (route or Route(device.link)).seconds(definition.link(op)))
    link = device.host_bandwidth * (definition.zero_copy or 1.0)
    crossing = max(sum(v.nbytes for v in values if v.place == "host") for values in (op.ins, op.outs))  # each direction
    host = min(crossing, traffic) / link  # of what it reads in part, such as an embedding, the traffic has the rows
    waiting = max(0.0, host - longest)
    seconds = device.launch_seconds + longest + passes / bandwidth
    attention = seconds if definition.attention else 0.0
    products = seconds if longest == arithmetic > 0 and not attention else 0.0
    return Cost(flops, traffic + passes, seconds + waiting, 0.0, waiting, host, attention, products)


def arithmetic_rate(op: Op, definition: OpDef, device: DeviceInfo, kernel: KernelDef | None = None) -> float:
    """Return the FLOP/s of `device` that price an op (`OpDef.math`) if `kernel` does not say which.

    A device without that rate runs it in fp32.
    """
    if kernel and kernel.arithmetic:
        rate = kernel.arithmetic[0]
    else:
        dtypes = (v.dtype for v in op.ins if v.dtype in device.flops)
        rate = definition.math(op) if definition.math else next(dtypes, "fp32")
    return device.flops.get(rate, device.flops["fp32"])


class OpCosts:
    """The costs of ops on a device. Ops of equal signature cost the same, so each signature is priced once."""

    def __init__(
        self, ops: Mapping[str, OpDef], device: DeviceInfo, kernel_of: KernelOf, route: Route | None = None
    ) -> None:
        self._ops = ops
        self._device = device
        self._kernel_of = kernel_of
        self._route = route
        self._costs: dict[Signature, Cost] = {}

    def __call__(self, op: Op) -> Cost:
        """Return `op_cost` of `op`."""
        if op.signature not in self._costs:
            kernel = self._kernel_of(op)
            self._costs[op.signature] = op_cost(op, self._ops[op.kind], self._device, kernel, self._route)
        return self._costs[op.signature]

    def taken(self, op: Op) -> float:
        """Return the share of the time of an op of a side lane by which concurrent kernels take longer."""
        if op.lane != "comm":
            return 0.0
        link = self._route.link if self._route else self._device.link
        return link.gathered if op.kind == "all_gather" else link.taken


def program_cost(program: Program, costs: OpCosts) -> Cost:
    """Return the cost of a program on the rank whose own ops take longest.

    Ops of a lane run one after another; the lanes overlap as `lane_order` says. Copies wait while an op uses values on
    the host, because both need the link. Collectives take multiprocessors from concurrent ops (`Link.taken`). The
    bandwidth that side lanes take from them is not counted.
    """
    flops = nbytes = 0
    attention = products = link = waiting = 0.0
    waits = lane_order(program.ops).waits
    busy: dict[Lane, float] = {"compute": 0.0}
    free: dict[Lane, float] = {"compute": 0.0}  # when a lane is done with all its ops so far
    ends: dict[int, float] = {}
    ranks = (None, _busiest(program, costs))
    for index, op in enumerate(program.ops):
        cost = costs(op) if op.owner in ranks else Cost()
        if op.times > 1:
            cost = cost.times(op.times)
        flops += cost.flops
        nbytes += cost.bytes
        attention += cost.attention_seconds
        products += cost.product_seconds
        link += cost.copy_seconds
        waiting += cost.waiting_seconds
        start = max([free.get(op.lane, 0.0), *(ends[i] for i in waits.get(index, ()))])
        if op.lane == "compute":
            free["compute"] = start + cost.seconds
            if cost.copy_seconds:
                free |= {lane: max(free.get(lane, 0.0), start) + cost.copy_seconds for lane in COPIES}
        else:
            free[op.lane] = ends[index] = max(start, free["compute"]) + cost.seconds
            free["compute"] += costs.taken(op) * cost.seconds
        busy[op.lane] = busy.get(op.lane, 0.0) + cost.seconds
    end, copies = max(free.values()), (busy.get(lane, 0.0) for lane in COPIES)
    waiting, link = waiting + end - busy["compute"], link + max(copies)
    return Cost(flops, nbytes, end, busy.get("comm", 0.0), waiting, link, attention, products)


def _busiest(program: Program, costs: OpCosts) -> int | None:
    """Return the rank that owns the ops which take longest; None: ranks own none."""
    seconds: dict[int, float] = {}
    for op in program.ops:
        if op.owner is not None:
            seconds[op.owner] = seconds.get(op.owner, 0.0) + costs(op).seconds
    return max(seconds, key=seconds.__getitem__, default=None)


def _traffic(op: Op) -> int:
    reads = sum(v.nbytes for v in op.ins)
    return reads + sum(v.nbytes * (2 if i in op.accumulate else 1) for i, v in enumerate(op.outs))
