"""Joins the processes of a run: finds the store, meets the others, and chooses the devices of this process."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from surogate_core.api import ConfigError, JoinContext, World
from surogate_core.api.members import Member, join_members
from surogate_core.api.tcp_store import TcpStore

from .place import SLURM, TORCHRUN, Environment, Place, find_place
from .rendezvous import find_rendezvous


def join(here: JoinContext, seconds: float) -> World:
    """Return the world of this process when all have joined. Raises ConfigError if the environment does not allow it,
    or if a process does not come within `seconds`."""
    try:
        place = find_place(here.environment)
        devices = devices_of(here, place)
        if place.size == 1:
            each = [device for device in devices for _ in range(here.ranks_per_device)]
            return World(size=len(each), ranks=range(len(each)), devices=each, started_by=str(place.starter))
        return _joined(here, place, devices, seconds)
    except ConfigError as error:
        raise ConfigError(f"launcher: env: {error}") from None


def _joined(here: JoinContext, place: Place, devices: Sequence[int], seconds: float) -> World:
    me = Member(
        process=place.rank,
        processes=place.size,
        machine=_machine(here.environment, place),
        devices=list(devices),
        uuids=[here.uuids[device] for device in devices] if here.uuids else [],
        ranks_per_device=here.ranks_per_device,
    )
    found = find_rendezvous(here.environment, place, seconds)
    try:
        store = TcpStore(found.address, seconds, listening=found.listening, prefix=f"surogate/{found.run}")
        return join_members(store, me, seconds, str(place.starter))
    finally:
        found.end()


def devices_of(here: JoinContext, place: Place) -> Sequence[int]:
    """Return the devices of this process: all that `gpus` asks for if it is alone on its machine, otherwise one."""
    if not here.on_gpu:
        if here.wanted not in (0, 1, place.on_node):
            raise ConfigError(f"gpus is {here.wanted}, but no GPU is visible here, and only one CPU can train.")
        return [0]
    if place.on_node == 1:
        count = here.wanted or here.device_count
        if count > here.device_count:
            raise ConfigError(
                f"gpus is {count}, but {here.device_count} are visible here. Use gpus: {here.device_count}, or 0 "
                "for all visible GPUs."
            )
        return range(count)
    if here.wanted not in (1, place.on_node) and not (here.wanted == 0 and here.device_count in (1, place.on_node)):
        what = f"0, which means all {here.device_count}" if here.wanted == 0 else str(here.wanted)
        raise ConfigError(
            f"gpus is {what}, but {place.on_node} processes run on this machine "
            f"({place.starter.on_node}), and each trains on one GPU. Start one process a machine, or as many as it has "
            "GPUs, with gpus: 1."
        )
    if here.device_count == 1:
        return [0]  # its own, hidden from the others; if not, their UUIDs are equal
    if place.local >= here.device_count and here.ranks_per_device == 1:
        raise ConfigError(
            f"{place.starter.local} is {place.local}, but {here.device_count} GPUs are visible here: there "
            f"are more processes ({place.starter.on_node} is {place.on_node}) than GPUs. Start {here.device_count} "
            f"processes a machine, or let several share a GPU with ranks_per_gpu."
        )
    return [place.local % here.device_count]


def _machine(environment: Environment, place: Place) -> str:
    """Return a word that is the same in all processes of this machine, and in no other."""
    variable = {TORCHRUN: "GROUP_RANK", SLURM: "SLURM_NODEID"}.get(place.starter, "")
    return environment.get(variable) or socket.gethostname()
