"""The way of collectives through the ranks of a run: its slowest link, and its latency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from ..api import DeviceInfo, Link

_HOP_SECONDS = 3.4e-6
_NETWORK_HOP_SECONDS = 14e-6
"""Latency of a step to the next rank, within a machine and between machines: those by which NCCL chooses its algorithms
(`src/graph/tuning.cc`, ring, Simple, NVLink and network)."""


@dataclass(frozen=True)
class Route:
    """A ring through all ranks.

    link     the slowest one, with the rate at which each rank sends while it receives at the same rate
    latency  seconds of an all-reduce besides those of its bytes
    """

    link: Link
    latency: float = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return the time of a collective in which each rank sends `nbytes`."""
        return self.latency + nbytes / self.link.bandwidth if nbytes else 0.0


def route(device: DeviceInfo, ranks: int, nodes: int = 1, ranks_per_device: int = 1) -> Route:
    """Return the way through `ranks` ranks on devices of `nodes` machines, with as many ranks on each.

    A ring enters and leaves a machine once. NCCL makes several, each through the port of another device, so that a
    machine sends at the rate of all its ports.
    """
    devices = ranks // ranks_per_device // nodes
    link = device.link
    if devices == 1:
        link = Link("its own memory", device.bandwidth / 2, device.source)  # each byte is read and written
    if nodes > 1:
        link = replace(link, gathered=link.taken)  # copy engines reach no other machine
        rate, network = devices * device.network.bandwidth, device.network
        if devices == 1 or rate < link.bandwidth:
            link = Link(network.name, rate, network.source)
    return Route(link, _latency(ranks, nodes))


def _latency(ranks: int, nodes: int) -> float:
    """Return the latency of an all-reduce by a ring, or by trees, whichever is less.

    There and back, a ring passes every rank, a tree the ranks of a machine and log2 of the machines.
    """
    ring = (ranks - nodes) * _HOP_SECONDS + (nodes - 1) * _NETWORK_HOP_SECONDS
    tree = (ranks // nodes - 1) * _HOP_SECONDS + log2(nodes) * _NETWORK_HOP_SECONDS
    return 2 * min(ring, tree)
