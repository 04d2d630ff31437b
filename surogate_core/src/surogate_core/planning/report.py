"""The report of a plan: bytes by segment, the largest values, time per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from operator import add
from typing import TYPE_CHECKING

from ..machine.devices import COLLECTIVE_BYTES, GATHER_BYTES
from ..machine.links import Route, route
from ..memory.alignment import align
from ..memory.cost import Cost, OpCosts, program_cost
from ..memory.lifetimes import Lifetime
from ..memory.plan import ArenaPlan, MemoryPlan
from ..program.op import Program
from ..program.passes.reduce import micro_step_counts
from ..program.value import WEIGHT_LABEL, Value

if TYPE_CHECKING:
    from ..api import DeviceInfo
    from ..assembly.assembly import Assembly
    from ..assembly.inputs import PlanInputs

PREPARED_STEPS = 3
"""Optimizer steps whose batches are in host memory: the current one, and two that the loader's thread prepares."""


@dataclass(frozen=True)
class SameValues:
    """Values of one shape and dtype, such as an activation of every block and its gradient.

    names   the kinds of values, such as "layers.*.mlp.up" for the params of all blocks
    count   of values of all these kinds
    nbytes  of each value
    """

    names: tuple[str, ...]
    count: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Memory and time of a run on each of several equal devices of equal machines.

    device_bytes          by segment, and "total"; on a CPU also the pinned memory, which is the device's there
    host_bytes            by purpose, for all devices of a machine, and "total"
    beside                of `host_bytes`, those that are not pinned and are of others than the run's programs
    host_memory           bytes of host memory that the run may pin on a machine; None: not known
    activations_by_label  bytes of the arena values that are live at the peak
    peak                  the op at which the arena is fullest, as text
    step                  cost of an optimizer step on one device, whose ranks take turns
    alone                 seconds of a step of the same programs without collectives. On a single device the update
                          takes longer, of which ranks divide the states.
    sent                  bytes that a rank sends to others in an optimizer step
    route                 the way of collectives
    tokens                positions of an optimizer step, on all devices
    world_size            ranks on all devices, `ranks_per_device` on each
    """

    device: DeviceInfo
    device_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    beside: Mapping[str, int]
    host_memory: int | None
    activations_by_label: Mapping[str, int]
    peak: str
    step: Cost
    alone: float
    sent: int
    route: Route
    tokens: int
    world_size: int
    nodes: int
    ranks_per_device: int

    @property
    def devices(self) -> int:
        """Devices of all machines."""
        return self.world_size // self.ranks_per_device

    @property
    def scaling(self) -> float:
        """Estimated speed of the run over that of the same programs without collectives."""
        return self.alone / self.step.seconds if self.step.seconds else 1.0

    @property
    def fits(self) -> bool:
        """Whether the device's memory suffices, and that of the host as far as it is known."""
        return self.missing_bytes <= 0 and self.missing_host_bytes <= 0

    @property
    def pinned_bytes(self) -> int:
        """Host memory that the run pins for offloading, for all devices of a machine."""
        return self.host_bytes["total"] - self.host_bytes["batches"] - sum(self.beside.values())

    @property
    def missing_host_bytes(self) -> int:
        """Bytes by which the pinned memory, and what is `beside`, exceed what the run may pin; 0 if they do not, or if
        that is not known."""
        needed = self.pinned_bytes + sum(self.beside.values())
        return 0 if not needed or self.host_memory is None else max(0, needed - self.host_memory)

    @property
    def missing_bytes(self) -> int:
        """By how much the total exceeds the device's memory; negative if there is room left."""
        return self.device_bytes["total"] - self.device.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Estimated positions per second, on all devices."""
        return self.tokens / self.step.seconds if self.step.seconds else 0.0


def summarise(assembly: Assembly, inputs: PlanInputs, arena_bytes: int | None = None) -> Report:
    """Return the memory and time of an optimizer step on the device that `inputs` name.

    The bytes of the plan's buffers are exact, unless `arena_bytes` says what to take for the arena's. "runtime" is an
    estimate from the device table.
    """
    if inputs.target is None:
        raise ValueError("a report needs a device")
    programs, memory, device = assembly.programs, assembly.memory, inputs.target.device
    steps, on_machine = inputs.grad_accum_steps, inputs.world_size // inputs.nodes
    name, arena = largest_arena(memory)
    alive = [life for life in arena.lives if life.first <= arena.peak_op <= life.last]
    scratch = sum(life.nbytes for life in alive if life.scratch)
    written = {value: index for index, op in enumerate(programs[name].ops) for value in op.outs}
    by_label: dict[str, int] = {}
    for life in alive:
        values = (life.value, *reversed(life.overwritten))  # of one place: the last one written so far is there
        label = next(value.label for value in values if written.get(value, 0) <= arena.peak_op)
        by_label[label] = by_label.get(label, 0) + life.nbytes
    parts = device_parts(assembly, inputs, memory.arena_bytes if arena_bytes is None else arena_bytes, scratch)
    batches = memory.segments["input"].nbytes * steps * PREPARED_STEPS * on_machine
    beside = {} if memory_is_the_hosts(device) else dict(inputs.beside(_trained(memory, inputs))[1])
    host = {"batches": batches} | _on_host(memory, on_machine) | beside
    peak_op = programs[name].ops[arena.peak_op] if programs[name].ops else None
    block = f" of block {peak_op.block}" if peak_op and peak_op.block >= 0 else ""
    way = route(device, inputs.world_size, inputs.nodes, inputs.ranks_per_device)
    runs = step_runs(assembly, inputs)
    step, alone = _step_cost(runs, OpCosts(inputs.ops, device, assembly.kernels.kernel, way))
    return Report(
        device=device,
        device_bytes={"total": sum(parts.values()), **parts},
        host_bytes={"total": sum(host.values()), **host},
        beside=beside,
        host_memory=inputs.host_memory,
        activations_by_label=dict(sorted(by_label.items(), key=lambda item: -item[1])),
        peak=f"{name}, op {arena.peak_op}: {peak_op.kind}{block}" if peak_op else name,
        step=step.times(inputs.ranks_per_device),
        alone=alone * inputs.ranks_per_device,
        sent=sum(inputs.ops[op.kind].link(op) * count for program, count in runs.items() for op in program.ops),
        route=way,
        tokens=inputs.tokens * steps * inputs.world_size,
        world_size=inputs.world_size,
        nodes=inputs.nodes,
        ranks_per_device=inputs.ranks_per_device,
    )


def step_runs(assembly: Assembly, inputs: PlanInputs) -> Mapping[Program, int]:
    """Return how often an optimizer step runs each program."""
    runs = {assembly.only("update"): 1}
    for kind, count in micro_step_counts(inputs.grad_accum_steps, inputs.world_size).items():
        runs[assembly.micro_step(first=kind.first, last=kind.last)] = count
    if inputs.loss.prepass:
        runs[assembly.only("evaluate")] = inputs.grad_accum_steps
    return runs


def _step_cost(runs: Mapping[Program, int], costs: OpCosts) -> tuple[Cost, float]:
    """Return the cost of a rank's optimizer step, and its seconds without collectives."""
    every = reduce(add, (program_cost(program, costs).times(count) for program, count in runs.items()))
    if not every.comm_seconds:
        return every, every.seconds
    alone = 0.0
    for program, count in runs.items():
        single = replace(program, ops=tuple(op for op in program.ops if op.lane != "comm"))
        alone += program_cost(single, costs).seconds * count
    return every, alone


def memory_is_the_hosts(device: DeviceInfo) -> bool:
    """Return whether what the host holds takes memory of the device: of a CPU."""
    return device.sm is None


def at_least(assembly: Assembly, inputs: PlanInputs) -> int:
    """Return the bytes of the arena, or only its live bytes if these alone are more than the device has room for."""
    assert inputs.target is not None
    memory = assembly.memory
    room = inputs.target.device.memory_bytes - sum(device_parts(assembly, inputs, memory.live_bytes).values())
    return memory.live_bytes if room < 0 else memory.arena_bytes


def device_parts(assembly: Assembly, inputs: PlanInputs, arena_bytes: int, scratch: int = 0) -> dict[str, int]:
    """Return the bytes that the device which `inputs` name needs, by purpose; `scratch` of the arena is workspace.

    All of its ranks have buffers of their own. They share what CUDA takes for the process.
    """
    assert inputs.target is not None
    memory, device, ranks = assembly.memory, inputs.target.device, inputs.ranks_per_device
    several = device.sm is not None and inputs.world_size > ranks
    parts = _purposes(memory)
    parts |= {
        "activations": arena_bytes - scratch,
        "workspace": scratch,
        "runtime": memory.segments["input"].nbytes,
    }
    parts = {name: nbytes * ranks for name, nbytes in parts.items()}
    collectives = COLLECTIVE_BYTES + (GATHER_BYTES if assembly.gathers and inputs.nodes == 1 else 0)
    parts["runtime"] += device.runtime_bytes + (collectives if several else 0)
    beside, on_host = inputs.beside(_trained(memory, inputs))
    parts |= beside
    if not memory_is_the_hosts(device):
        return parts
    pinned = _on_host(memory, ranks)
    return {**parts, **({"pinned": sum(pinned.values())} if pinned else {}), **on_host}


def _trained(memory: MemoryPlan, inputs: PlanInputs) -> int:
    """Return the elements of the params that are trained, each of which has a gradient, on all ranks."""
    held = sum(prod(value.shape) for value in memory.segments["grad"].offsets)
    return held * (inputs.sharding.parts if inputs.sharding.gradients else 1)


def _on_host(memory: MemoryPlan, ranks: int) -> dict[str, int]:
    """Return the bytes of the values that `ranks` ranks place on the host, without those that are empty."""
    found = _purposes(memory.host) | {"activations": memory.host.arena_bytes} if memory.host else {}
    return {name: nbytes * ranks for name, nbytes in found.items() if nbytes}


def _purposes(memory: MemoryPlan) -> dict[str, int]:
    """Return the bytes of the segments. Quantized and copied weights are states, and count as weights."""
    states = memory.segments["state"]
    copies = sum(align(v.nbytes) for v in states.offsets if v.derived or v.label == WEIGHT_LABEL)
    return {
        "weights": memory.segments["param"].nbytes + copies,
        "gradients": memory.segments["grad"].nbytes,
        "optimizer": states.nbytes - copies,
    }


def largest_values(assembly: Assembly) -> list[SameValues]:
    """Return all values of the segments and of the largest arena, grouped by shape and dtype, largest first."""
    memory = assembly.memory
    name, arena = largest_arena(memory)
    program = assembly.programs[name]
    persistent = [(_kind(v), v) for segment in memory.segments.values() for v in segment.offsets]
    shared = [(_contents(life, program), life.value) for life in arena.lives]
    names: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
    for name, v in (*persistent, *shared):
        names.setdefault((v.nbytes, v.dtype, v.shape), []).append(name)
    groups = (SameValues((*dict.fromkeys(same),), len(same), *key) for key, same in names.items())
    return sorted(groups, key=lambda group: -group.nbytes)


def largest_arena(memory: MemoryPlan) -> tuple[str, ArenaPlan]:
    return max(memory.arenas.items(), key=lambda item: item[1].lower_bound)


def _contents(life: Lifetime, program: Program) -> str:
    """Return the name of what is at a place of the arena: of the value that was there first, or whose workspace."""
    if life.scratch:
        return f"workspace of {program.ops[life.first].kind}"
    return (*life.overwritten, life.value)[0].label


def _kind(value: Value) -> str:
    """Return the name of a param, gradient or state with * instead of the block index."""
    return ".".join("*" if part.isdigit() else part for part in value.name.split("."))
