"""The processes of a run meet: each says who it is, and learns who the others are."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ..errors import ConfigError
from ..front_end import called
from .world import Store, StoreLost, World

__all__ = ["Member", "join_members"]

_REFUSED = "join/refused"


@dataclass(frozen=True, kw_only=True)
class Member:
    """The facts that a process tells the others when it joins.

    process, processes  its index, and the number of processes that it was told
    machine             the same word in all processes of a machine
    devices             that it trains on, as indices among those visible to it
    uuids               of these devices, if they are GPUs
    ranks_per_device    wanted on each device, by all processes that share it
    """

    process: int
    processes: int
    machine: str
    devices: Sequence[int]
    uuids: Sequence[str] = ()
    ranks_per_device: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"process {self.process} (pid {self.pid} on {self.host})"


def join_members(store: Store, me: Member, seconds: float, started_by: str) -> World:
    """Return the world of this process when all others have joined. Closes the store if it raises.

    Raises ConfigError, in every process that has come, if one does not come within `seconds`, if two have the same
    index, if they were told different numbers of processes, or if their devices do not fit together.
    """
    try:
        return replace(_world(store, _meet(store, me, seconds), me, started_by), join_seconds=seconds)
    except StoreLost as error:
        raise ConfigError(f"{started_by}: {error}, before all processes had joined. Its output says why.") from None
    except ConfigError as error:
        store.close()
        raise ConfigError(f"{started_by}: {error}") from None
    except BaseException:
        store.close()
        raise


def _meet(store: Store, me: Member, seconds: float) -> list[Member]:
    deadline = time.monotonic() + seconds
    if store.add(f"join/{me.process}/count", 1) > 1:
        raise _refusal(store, f"{_member(store, me.process, deadline)} and {me} have the same index")
    store.set(f"join/{me.process}", json.dumps(asdict(me), default=list).encode())
    try:
        first = _member(store, 0, deadline)
        if first.processes != me.processes:
            raise _refusal(
                store,
                f"{first} is one of {first.processes}, but {me} is one of {me.processes}. Start all with the same "
                "number; runs at the same time need different addresses.",
            )
        return [first, *(_member(store, process, deadline) for process in range(1, me.processes))]
    except TimeoutError:
        raise _refusal(store, _absence(store, me, seconds)) from None


def _absence(store: Store, me: Member, seconds: float) -> str:
    came = [process for process in range(me.processes) if store.has(f"join/{process}")]
    missing = sorted(set(range(me.processes)) - set(came))
    hosts = sorted({_member(store, process, time.monotonic() + 1).host for process in came})
    return (
        f"of {me.processes} processes, {numbers(came)} came (on {', '.join(hosts)}) and {numbers(missing)} did not "
        f"within {seconds:g} s. Look at the output of those that did not; if they start slowly, raise join_seconds."
    )


def _member(store: Store, process: int, deadline: float) -> Member:
    """Return what a process said of itself. Raises TimeoutError, and ConfigError if another process has refused."""
    while True:
        left = deadline - time.monotonic()
        try:
            return Member(**json.loads(store.get(f"join/{process}", max(min(left, 0.5), 0))))
        except TimeoutError:
            if store.has(_REFUSED):
                raise ConfigError(store.get(_REFUSED, 1).decode()) from None
            if left <= 0.5:
                raise


def _refusal(store: Store, why: str) -> ConfigError:
    """Return the error to raise, after telling it to the processes that wait for others."""
    store.set(_REFUSED, why.encode())
    return ConfigError(why)


def _world(store: Store, members: Sequence[Member], me: Member, started_by: str) -> World:
    users: dict[str, list[Member]] = {}
    for member in members:
        for uuid in member.uuids:
            users.setdefault(uuid, []).append(member)
    counts = [_ranks_per_device(member, users) * len(member.devices) for member in members]
    for member, count in zip(members, counts, strict=True):
        if count != counts[0]:
            raise ConfigError(
                f"{members[0]} would have {counts[0]} ranks, but {member} {count}. Every process must have equally "
                f"many: see gpus, {called('ranks_per_device')} and CUDA_VISIBLE_DEVICES."
            )
    count, each = counts[0], counts[0] // len(me.devices)
    return World(
        size=sum(counts),
        nodes=len({member.machine for member in members}),
        processes=len(members),
        started_by=started_by,
        store=store,
        ranks=range(me.process * count, (me.process + 1) * count),
        devices=[device for device in me.devices for _ in range(each)],
        process=me.process,
    )


def _ranks_per_device(member: Member, users: Mapping[str, Sequence[Member]]) -> int:
    """Return the ranks that a process has on each of its devices: its share of those of all processes that use it."""
    shared = max((len(users[uuid]) for uuid in member.uuids), default=1)
    ranks, rest = divmod(member.ranks_per_device, shared)
    if rest:
        uuid = max(member.uuids, key=lambda uuid: len(users[uuid]))
        raise ConfigError(
            f"{' and '.join(map(str, users[uuid]))} use the same GPU ({uuid}), and {called('ranks_per_device')} "
            f"is {member.ranks_per_device}. Give each its own GPU, or set {called('ranks_per_device')}: {shared}."
        )
    return ranks


def numbers(numbers: Sequence[int], to: str = "-") -> str:
    """Return ascending numbers, shortened: "0-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}{to}{span[-1]}" for span in spans)
