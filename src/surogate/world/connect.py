"""The communicators of the ranks of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from surogate_core.api import Comm, World
from surogate_core.errors import ConfigError
from surogate_core.runtime.comms.single import SingleComm
from surogate_core.runtime.threads import RankThread

from .processes import Processes

_CHECK_SECONDS = 0.1  # between two looks for failures while ranks are connected


@contextmanager
def connected(
    processes: Processes, transport: str, on_gpu: bool, notice: Callable[[str], None] = lambda line: None
) -> Iterator[Sequence[Comm]]:
    """Yield a communicator for each rank of this process, in order of rank, and end them afterwards.

    `transport` is the key of the config. `notice` is called with a line on several ranks. Raises ConfigError if the
    transport cannot connect them.
    """
    world = processes.world
    if world.size == 1:
        yield (SingleComm(device=world.devices[0]),)
        return
    from surogate_core.runtime import nccl
    from surogate_core.runtime.comms import copies, gloo

    chosen = choose_transport(processes, transport, on_gpu)
    notice(f"{_topology(world)}, connected by {chosen}")
    connect: Callable[[], Sequence[Any]]
    if chosen == "nccl":
        library = nccl.load()
        identity = bytes(processes.share([*nccl.new_identity(library)] if world.writer else None, "the start of nccl"))
        connect = partial(nccl.connect, world, library, identity)
    else:
        connect = partial(copies.connect, world.devices) if chosen == "copies" else partial(gloo.connect, world)
    comms = _started(processes, f"the start of {chosen}", connect)
    try:
        yield comms
    finally:
        if chosen == "nccl":
            nccl.disconnect(comms)
        for comm in comms:
            comm.abort()


def _started(processes: Processes, what: str, connect: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """Return the result of `connect`, in which a library waits for the ranks of other processes, if need be for ever.

    It runs on a thread that can be left behind (`leave_if_stuck`). To the watch it is a collective of all ranks: if it
    takes longer than `join_seconds`, the run fails with the names of those that have not come.
    """
    thread = RankThread("surogate-connect")
    processes.at("connecting the ranks", processes.world.join_seconds)
    with ExitStack() as stack:
        for position in processes.positions:
            stack.enter_context(position.collective(what, 0))
        stack.callback(thread.close)
        made = thread.submit(connect)
        while not wait([made], _CHECK_SECONDS).done:
            processes.check()
        comms = made.result()
        processes.barrier(what)  # a rank that is connected is not late
    return comms


def _topology(world: World) -> str:
    ranks = f"{world.size} ranks"
    if world.processes == 1:
        return f"{ranks} in one process"
    machines = "one machine" if world.nodes == 1 else f"{world.nodes} machines"
    return f"{world.started_by}: {ranks} in {world.processes} processes on {machines}"


def choose_transport(processes: Processes, transport: str, on_gpu: bool) -> str:
    """Return the transport of several ranks: "nccl", "copies" or "gloo". Waits for the other processes.

    Raises ConfigError if `transport` is none that can connect them.
    """
    world = processes.world
    several = world.processes > 1
    if transport == "copies" and several:
        raise ConfigError(
            f"transport: copies: ranks read each other's memory in one process, and there are {world.processes} "
            f"({world.started_by}). Use transport: auto, or start one process."
        )
    if transport == "nccl" and not on_gpu:
        raise ConfigError("transport: nccl: connects GPUs, and the CPU trains here. Use transport: auto.")
    if transport in ("copies", "gloo"):
        return transport
    shared = _shared_gpus(processes) if on_gpu else []
    if transport == "nccl" and shared:
        raise ConfigError(
            f"transport: nccl: cannot connect several ranks on one GPU ({', '.join(shared)}). Use ranks_per_gpu: 1 and "
            "a GPU for each process, or transport: auto, which is slow."
        )
    return "nccl" if on_gpu and not shared else "gloo" if several else "copies"


def _shared_gpus(processes: Processes) -> list[str]:
    """Return the GPUs that have several ranks, of this process or of others."""
    from surogate_core.runtime.device import gpu_uuids

    found = processes.gather(gpu_uuids(processes.world.devices), "the choice of the transport")
    ranks = Counter(uuid for uuids in found for uuid in uuids)
    return [uuid for uuid, count in ranks.items() if count > 1]
