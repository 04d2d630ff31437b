"""The Ray cluster of a run: how it is reached, and the nodes that are held for the run."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from surogate_core.api import ConfigError

from .probes import ask, free_resources

CPUS: Final = 1
"""CPUs of a node that a run asks for. It uses more: a node that trains does nothing else."""

CONNECT_SECONDS: Final = 10.0

_AT_ONCE = 3.0
"""Seconds in which nodes that are free are held. Waiting for longer is worth a notice."""

_PERIOD = 0.5
"""Seconds between two looks at whether nodes are free."""


@dataclass(frozen=True)
class Wanted:
    """Nodes to hold: each has CPUs and GPUs, and no two are the same machine."""

    nodes: int
    gpus: int

    @property
    def bundle(self) -> dict[str, int]:
        return {"CPU": CPUS} | ({"GPU": self.gpus} if self.gpus else {})

    def __str__(self) -> str:
        each = f"{CPUS} CPU" + (f" and {self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else "")
        return f"{self.nodes} nodes with {each} each" if self.nodes > 1 else f"a node with {each}"


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster for the duration of the block, unless this process is connected already.

    Raises ConfigError if there is none, or if its Ray or Python differs from this process's.
    """
    if ray.is_initialized():
        yield
        return
    _refuse_unreachable(address)
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (RayError, RuntimeError, ValueError, OSError) as error:  # ConnectionError is an OSError
        with suppress(Exception):
            ray.shutdown()
        raise ConfigError(_unreachable(address, error)) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)  # Ray sets its own
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Raise ConfigError if nothing listens at an address with a port. Ray would try for minutes."""
    found = re.fullmatch(
        r"(?:ray://)?([^:/]+):(\d+)", os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    )
    if found:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(_unreachable(address, error)) from None


def _unreachable(address: str, error: Exception) -> str:
    where = f"distributed.ray_address: {address}"
    if address == "auto":
        where += f" (RAY_ADDRESS is {os.environ.get('RAY_ADDRESS') or 'not set'})"
    reason = " ".join(str(error).split())[:400].rstrip(".")
    return (
        f"{where}: this process cannot join a Ray cluster: {reason}. Start one with `ray start --head`, give its "
        "address, or use local for this machine alone."
    )


def wanted_nodes(nodes: int, gpus_per_node: int, gpus: int) -> Wanted:
    """Return the nodes that a run needs. `gpus`: the key of that name, which is for one machine without a launcher.

    Raises ConfigError if not enough nodes of the cluster have GPUs.
    """
    if gpus not in (0, 1, gpus_per_node):
        raise ConfigError(
            f"gpus: {gpus}: counts the GPUs of one machine. With launcher: ray use distributed.gpus_per_node: {gpus}."
        )
    if gpus_per_node:
        return Wanted(nodes, gpus_per_node)
    having = sorted((int(node["Resources"].get("GPU", 0)) for node in _alive()), reverse=True)
    if not having or not having[0]:
        return Wanted(nodes, 0)
    if len(having) < nodes or not having[nodes - 1]:
        raise ConfigError(
            f"distributed: num_nodes is {nodes}, but {sum(count > 0 for count in having)} of the {len(having)} nodes "
            "of the cluster have GPUs. Use fewer, or, if the cluster adds nodes on demand, set gpus_per_node."
        )
    return Wanted(nodes, having[nodes - 1])


@contextmanager
def held(wanted: Wanted, seconds: float, notice: Callable[[str], None]) -> Iterator[PlacementGroup]:
    """Hold nodes for the duration of the block. Raises ConfigError if they are not free within `seconds`."""
    group = placement_group([wanted.bundle] * wanted.nodes, strategy="STRICT_SPREAD")
    try:
        deadline = time.monotonic() + seconds
        if not group.wait(min(_AT_ONCE, seconds)):
            notice(f"waiting up to {seconds:g} s for {wanted} in the Ray cluster")
            while not group.wait(_PERIOD):
                if time.monotonic() > deadline:
                    raise ConfigError(_not_free(wanted, seconds))
        yield group
    finally:
        with suppress(RayError):  # with it Ray ends what still runs there
            remove_placement_group(group)


def on(group: PlacementGroup, node: int) -> PlacementGroupSchedulingStrategy:
    """Return the strategy that runs a task or an actor on a node that is held."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _not_free(wanted: Wanted, seconds: float) -> str:
    (free,) = ask(free_resources, ["DEFAULT"])
    each = "; ".join(_free_text(node, free.get(node["NodeID"], {}), wanted) for node in _alive())
    return (
        f"launcher: ray: {wanted} {'was' if wanted.nodes == 1 else 'were'} not free within {seconds:g} s. Free are: "
        f"{each}. Wait for other jobs, lower distributed.num_nodes or gpus_per_node, or raise placement_seconds if the "
        "cluster adds nodes on demand."
    )


def _free_text(node: Mapping[str, Any], free: Mapping[str, float], wanted: Wanted) -> str:
    kinds: Sequence[str] = ("CPU", "GPU") if wanted.gpus else ("CPU",)
    counts = [f"{free.get(kind, 0):g} of {node['Resources'].get(kind, 0):g} {kind}s" for kind in kinds]
    return f"{', '.join(counts)} on {node['NodeManagerAddress']} ({node['NodeManagerHostname']})"
