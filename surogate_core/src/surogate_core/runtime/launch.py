"""The built-in launcher: one process with a thread per GPU. A launcher plugin can add processes and machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..api import Comm, LauncherDef, Topology


@dataclass(frozen=True)
class SingleComm:
    """The `Comm` of a run with one worker. A sum over one worker changes nothing."""

    rank: int = 0
    world_size: int = 1
    device: int = 0

    def all_reduce(self, ranges: Sequence[tuple[int, int, str]], how: str, stream: int) -> None:
        """See `Comm`."""

    def check(self) -> None:
        """See `Comm`."""

    def abort(self) -> None:
        """See `Comm`."""


def run_local(work: Callable[[Sequence[Comm]], Any], topology: Topology, options: object = None) -> Any:
    """Call `work` in this process with communicators of the first `topology.devices` GPUs. They end when it returns."""
    if topology.devices == 1:
        return work((SingleComm(),))
    from . import nccl

    comms = nccl.connect(range(topology.devices))
    try:
        return work(comms)
    finally:
        nccl.disconnect(comms)


LAUNCHERS = (LauncherDef(name="local", summary="One process with a thread per GPU", run=run_local),)
