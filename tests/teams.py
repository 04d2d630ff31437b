"""Teams on a CPU: ranks are threads that run the references and sum at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import Comm
from surogate_core.planning.plan import Plan
from surogate_core.planning.run import Run
from surogate_core.runtime import device, nccl
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker
from surogate_core.train import trainer


@dataclass
class Exchange:
    """The values of all ranks of a team, and the barrier at which they are exchanged."""

    world_size: int
    values: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world_size, timeout=60)


@dataclass
class ExchangeComm:
    """The `Comm` of a rank. `combine` replaces the reference of all_reduce."""

    rank: int
    exchange: Exchange
    device: int = 0

    @property
    def world_size(self) -> int:
        return self.exchange.world_size

    def combine(self, *values: Tensor, world_size: int, how: str) -> tuple[Tensor, ...]:
        """Sum in fp64 and in order of rank, which gives the same bits on all ranks, or take the maximum."""
        assert world_size == self.world_size
        self.exchange.values[self.rank] = values
        self.exchange.barrier.wait()
        parts = [self.exchange.values[rank] for rank in range(world_size)]
        stacked = [torch.stack([p.double() for p in part]) for part in zip(*parts, strict=True)]
        combined = (part.sum(0) if how == "sum" else part.amax(0) for part in stacked)
        totals = tuple(part.to(value.dtype) for part, value in zip(combined, values, strict=True))
        self.exchange.barrier.wait()
        return totals

    def all_reduce(self, ranges: Sequence[tuple[int, int, str]], how: str, stream: int) -> None:
        raise AssertionError("a CPU has no streams")

    def check(self) -> None:
        pass

    def abort(self) -> None:
        self.exchange.barrier.abort()


def comms(world_size: int) -> tuple[ExchangeComm, ...]:
    exchange = Exchange(world_size)
    return tuple(ExchangeComm(rank, exchange, rank) for rank in range(world_size))


def cpu_team(opened: Run, plan: Plan, ways: Sequence[Comm], notice: Callable[[str], None] = print) -> Team:
    """Return a team of CPU workers, one per communicator, for a run planned with this world size."""

    def make(comm: Any) -> Worker:
        config = opened.config
        instead = {"all_reduce": comm.combine}
        return Worker.on_cpu(plan.assembly, plan.inputs.ops, config.train_seed, poison=True, instead=instead)

    return Team(ways, make)


def pretend(world_size: int, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make `run.train` find `world_size` devices on this CPU. `replace(object, name, value)` applies the patches."""
    replace(device, "devices_to_use", lambda gpus: world_size)
    replace(nccl, "connect", lambda devices: comms(len(devices)))
    replace(nccl, "disconnect", lambda comms: [comm.abort() for comm in comms])
    replace(trainer, "make_worker", cpu_team)
