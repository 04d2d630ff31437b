"""Teams on a CPU: ranks are threads that run the references, and sums are made where the threads meet."""

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
class Meeting:
    """Where the ranks of a team meet."""

    world_size: int
    values: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world_size, timeout=60)


@dataclass
class MeetingComm:
    """A rank's `Comm`, whose `sum` takes the place of the reference of all_reduce."""

    rank: int
    meeting: Meeting
    device: int = 0

    @property
    def world_size(self) -> int:
        return self.meeting.world_size

    def sum(self, *values: Tensor, world_size: int) -> tuple[Tensor, ...]:
        """In fp64 and in order of rank: the same bits on all of them."""
        assert world_size == self.world_size
        self.meeting.values[self.rank] = values
        self.meeting.barrier.wait()
        parts = [self.meeting.values[rank] for rank in range(world_size)]
        totals = tuple(
            torch.stack([p.double() for p in part]).sum(0).to(part[0].dtype) for part in zip(*parts, strict=True)
        )
        self.meeting.barrier.wait()
        return totals

    def all_reduce(self, ranges: Sequence[tuple[int, int, str]], stream: int) -> None:
        raise AssertionError("a CPU has no streams")

    def check(self) -> None:
        pass

    def abort(self) -> None:
        self.meeting.barrier.abort()


def comms(world_size: int) -> tuple[MeetingComm, ...]:
    meeting = Meeting(world_size)
    return tuple(MeetingComm(rank, meeting, rank) for rank in range(world_size))


def cpu_team(opened: Run, plan: Plan, ways: Sequence[Comm], notice: Callable[[str], None] = print) -> Team:
    """Workers of a run that was planned for as many, each by references."""

    def make(comm: Any) -> Worker:
        config = opened.config
        instead = {"all_reduce": comm.sum}
        return Worker.on_cpu(plan.assembly, plan.inputs.ops, config.train_seed, poison=True, instead=instead)

    return Team(ways, make)


def pretend(world_size: int, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let `run.train` find `world_size` devices on this CPU. `replace(object, name, value)` makes the changes."""
    replace(device, "devices_to_use", lambda gpus: world_size)
    replace(nccl, "connect", lambda devices: comms(len(devices)))
    replace(nccl, "disconnect", lambda ways: [way.abort() for way in ways])
    replace(trainer, "make_worker", cpu_team)
