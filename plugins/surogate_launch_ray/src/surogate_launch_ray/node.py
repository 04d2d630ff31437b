"""The actor of a node: a process that trains all ranks of the node, in its main thread."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import socket
import struct
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NoReturn

import ray

from surogate_core.api import SurogateError, Task
from surogate_core.api.members import Member, join_members
from surogate_core.api.tcp_store import Address, TcpStore, listen

from .cluster import CPUS
from .mailbox import Correspondence, Stream

JOIN_SECONDS: Final = 600.0
"""Seconds that a process waits at the start for the others."""


@dataclass(frozen=True)
class Part:
    """The task of a node in a run.

    process, processes  its index, and their number
    gpus                of the node; 0: its CPU trains
    address             of the store
    folder              in which the run was started: relative paths of the config begin there
    """

    process: int
    processes: int
    gpus: int
    address: Address
    folder: str


@dataclass(frozen=True)
class Outcome:
    """The result of a process: what it returned or raised."""

    value: Any = None
    error: BaseException | None = None


class Node:
    """Trains in a process of a node. Ray calls the methods of an actor one after another, in its main thread."""

    def __init__(self) -> None:
        self._listening: socket.socket | None = None

    def listen(self) -> Address:
        """Return an address of this node at which it holds the store, on the interface that carries Ray's address."""
        host = ray.util.get_node_ip_address()
        self._listening = listen(Address(host, 0))
        return Address(host, self._listening.getsockname()[1], remedy="Nodes of a Ray cluster must reach each other.")

    def train(self, task: Task, part: Part, mailbox: Any) -> Outcome:
        """Train the task and return how that ended. `mailbox`: for the process of rank 0, else None."""
        correspondence = Correspondence(mailbox) if mailbox is not None else None
        try:
            with contextlib.ExitStack() as stack:
                if correspondence is not None:
                    stack.enter_context(contextlib.redirect_stdout(Stream(correspondence, "out")))
                    stack.enter_context(contextlib.redirect_stderr(Stream(correspondence, "err")))
                stack.enter_context(_handlers())
                return Outcome(self._train(task, part, correspondence))
        except BaseException as error:
            return Outcome(error=portable(error))
        finally:
            if correspondence is not None:
                correspondence.close()

    def _train(self, task: Task, part: Part, correspondence: Correspondence | None) -> Any:
        os.chdir(part.folder)
        if part.gpus and os.environ.get("OMP_NUM_THREADS") == str(CPUS):
            del os.environ["OMP_NUM_THREADS"]  # Ray's, by the CPUs that were asked for
        os.environ.update(environment_of_node(task, part.gpus))
        node = ray.get_runtime_context().get_node_id()
        me = Member(
            process=part.process,
            processes=part.processes,
            machine=node,
            devices=range(part.gpus) if part.gpus else [0],
            ranks_per_device=int(task.config.get("ranks_per_gpu", 1)),
        )
        store = TcpStore(part.address, JOIN_SECONDS, listening=self._listening)
        world = join_members(store, me, JOIN_SECONDS, "Ray")
        if correspondence is not None:
            return task.work(world, correspondence.notice)
        return task.work(world)


def environment_of_node(task: Task, gpus: int) -> dict[str, str]:
    """Return the variables to set: those of the task, and the interface that nodes use to reach each other."""
    found = dict(task.environment)
    if not gpus:
        found["CUDA_VISIBLE_DEVICES"] = ""
    interface = interface_of(ray.util.get_node_ip_address())
    if interface:
        found.setdefault("NCCL_SOCKET_IFNAME", os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}"))
        found.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", interface))
    return found


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address; "" if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asking, 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


@contextlib.contextmanager
def _handlers() -> Iterator[None]:
    """Let signals that come before the first step end the process, as `surogate` does. Training sets its own."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    def nothing(number: int, frame: FrameType | None) -> None:
        """There is nothing to save."""

    chosen = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGUSR1: nothing,
    }
    before = {number: signal.signal(number, handler) for number, handler in chosen.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def portable(error: BaseException) -> BaseException:
    """Return an error that can be raised in another process: itself, or one of the nearest class that can.

    An error that nobody raised on purpose carries its traceback as a note.
    """
    if not isinstance(error, SurogateError | KeyboardInterrupt | SystemExit):
        error.add_note("".join(traceback.format_exception(error)))
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        return error
    for kind in type(error).__mro__[1:]:
        with contextlib.suppress(Exception):
            again: BaseException = pickle.loads(pickle.dumps(kind(str(error))))
            again.__dict__.update({name: value for name, value in vars(error).items() if name in ("told", "__notes__")})
            return again
    raise AssertionError("every text makes an Exception")
