"""Joins the processes of a run: finds the store, meets the others, and chooses the devices of this process."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from surogate_core.api import ConfigError, JoinContext, World
from surogate_core.api.members import Member, join_members
from surogate_core.api.tcp_store import TcpStore

from .place import SLURM, TORCHRUN, Environment, Place, find_place
from .rendezvous import find_rendezvous


def join(context: JoinContext, seconds: float) -> World:
    """Return the world of this process when all have joined. Raises ConfigError if the environment does not allow it,
    or if a process does not come within `seconds`."""
    try:
        place = find_place(context.environment)
        devices = devices_of(context, place)
        if place.size == 1:
            each = [device for device in devices for _ in range(context.ranks_per_device)]
            return World(size=len(each), ranks=range(len(each)), devices=each, started_by=str(place.starter))
        return _joined(context, place, devices, seconds)
    except ConfigError as error:
        raise ConfigError(f"launcher: env: {error}") from None


def _joined(context: JoinContext, place: Place, devices: Sequence[int], seconds: float) -> World:
    me = Member(
        process=place.rank,
        processes=place.size,
        machine=_machine(context.environment, place),
        devices=list(devices),
        uuids=[context.uuids[device] for device in devices] if context.uuids else [],
        ranks_per_device=context.ranks_per_device,
    )
    found = find_rendezvous(context.environment, place, seconds)
    try:
        store = TcpStore(found.address, seconds, listening=found.listening, prefix=f"surogate/{found.run}")
        return join_members(store, me, seconds, str(place.starter))
    finally:
        found.end()


def devices_of(context: JoinContext, place: Place) -> Sequence[int]:
    """Return the devices of this process: all that `gpus` asks for if it is alone on its machine, otherwise one."""
    if not context.on_gpu:
        if context.wanted not in (0, 1, place.on_node):
            raise ConfigError(f"gpus is {context.wanted}, but no GPU is visible here, and only one CPU can train.")
        return [0]
    if place.on_node == 1:
        count = context.wanted or context.device_count
        if count > context.device_count:
            raise ConfigError(
                f"gpus is {count}, but {context.device_count} are visible here. Use gpus: {context.device_count}, or 0 "
                "for all visible GPUs."
            )
        return range(count)
    if context.wanted not in (1, place.on_node) and not (
        context.wanted == 0 and context.device_count in (1, place.on_node)
    ):
        what = f"0, which means all {context.device_count}" if context.wanted == 0 else str(context.wanted)
        raise ConfigError(
            f"gpus is {what}, but {place.on_node} processes run on this machine "
            f"({place.starter.on_node}), and each trains on one GPU. Start one process a machine, or as many as it has "
            "GPUs, with gpus: 1."
        )
    if context.device_count == 1:
        return [0]  # its own, hidden from the others; if not, their UUIDs are equal
    if place.local >= context.device_count and context.ranks_per_device == 1:
        raise ConfigError(
            f"{place.starter.local} is {place.local}, but {context.device_count} GPUs are visible here: there "
            f"are more processes ({place.starter.on_node} is {place.on_node}) than GPUs. Start {context.device_count} "
            f"processes a machine, or let several share a GPU with ranks_per_gpu."
        )
    return [place.local % context.device_count]


def _machine(environment: Environment, place: Place) -> str:
    """Return a word that is the same in all processes of this machine, and in no other."""
    variable = {TORCHRUN: "GROUP_RANK", SLURM: "SLURM_NODEID"}.get(place.starter, "")
    return environment.get(variable) or socket.gethostname()
