"""The built-in launcher: this process, with a thread for each GPU. Other processes and machines join at this seam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Comm, LauncherDef, Topology


@dataclass(frozen=True)
class SingleComm:
    """The `Comm` of the only worker of a run: sums over one are what they are."""

    rank: int = 0
    world_size: int = 1
    device: int = 0

    def all_reduce(self, ranges: Sequence[tuple[int, int, str]], stream: int) -> None:
        """Nothing to add."""

    def check(self) -> None:
        """Nobody to lose."""

    def abort(self) -> None:
        """Nothing waits."""


def run_local(work: Callable[[Sequence[Comm]], Any], topology: Topology, options: object = None) -> Any:
    """Call `work` here, with a way between the first `topology.devices` GPUs, which it may not outlive."""
    if topology.devices == 1:
        return work((SingleComm(),))
    from . import nccl

    comms = nccl.connect(range(topology.devices))
    try:
        return work(comms)
    finally:
        nccl.disconnect(comms)


LAUNCHERS = (LauncherDef(name="local", summary="This process, with a thread for each GPU", run=run_local),)
