"""The `Store` of several processes, over torch's TCPStore. Torch is imported when a store is opened.

One thread of each process makes all calls. It never waits in the server for a key, so a `get` on one thread does not
delay the heartbeat of another, and a server that stops answering, as a machine without power does, costs each caller
ANSWER_SECONDS instead of blocking it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from ..errors import ConfigError
from .world import StoreLost

__all__ = ["Address", "TcpStore", "listen"]

_T = TypeVar("_T")
_Call = tuple["Future[Any]", Callable[[Any], Any], Any]
"""The future of its result, the call, and the store of torch that it is for."""

ANSWER_SECONDS = 8.0
"""A store that has not answered for so long is lost."""

LEAVE_SECONDS = 5.0
"""Seconds that the process that holds the store waits in `close` until the others have closed their ends."""

_TORCH_SECONDS = 300.0  # that torch waits for a key by default
_LONGEST_ATTEMPT = 10.0  # to connect
_FIRST_WAIT, _LONGEST_WAIT = 0.0002, 0.02  # seconds between two looks for a key


@dataclass(frozen=True)
class Address:
    """The address of the store of a run.

    owner   the process that holds it, for errors
    remedy  a sentence on how to use another address
    """

    host: str
    port: int
    owner: str = "the process of rank 0"
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.owner} at {self.host}:{self.port}"

    @property
    def of_this_machine(self) -> bool:
        """Whether only processes of the same machine can reach it."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at the port, on all interfaces unless the address is of this machine alone.

    Raises ConfigError if the port is taken.
    """
    host = "127.0.0.1" if address.of_this_machine else ""
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server((host, address.port), family=family, backlog=4096, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"port {address.port} of {socket.gethostname()}, at which {address.owner} must listen, cannot be used: "
            f"{os.strerror(error.errno or 0)}. {address.remedy}"
        ) from None


class TcpStore:
    """A `Store` that all processes of a run reach over TCP. Each process opens one.

    listening  the socket of `listen` in the process that holds the store, None in the others
    prefix     of all keys, so that runs which share a server are apart

    Raises ConfigError if the store cannot be reached within `seconds`.
    """

    def __init__(
        self, address: Address, seconds: float, *, listening: socket.socket | None = None, prefix: str = "surogate"
    ) -> None:
        self.address = address
        self._prefix = prefix
        self._holds = listening is not None
        self._lost = ""
        self._store: Any = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._calling = Lock()  # no call follows the end of the calls
        _torch()  # takes seconds on a busy machine
        host = "127.0.0.1" if listening is not None else _reached(address, seconds)
        Thread(target=_make_calls, args=(self._calls,), name="store", daemon=True).start()
        try:
            # The process that listens may still be importing torch. torch's own limit would word the error otherwise.
            limit = max(seconds, ANSWER_SECONDS)
            self._store = self._answer(lambda _: _opened(host, address.port, listening, prefix, limit + 1), limit)
            self.add("opened", 1)
        except StoreLost as error:
            raise ConfigError(f"{error}. Does another program listen there? {address.remedy}") from None

    @property
    def torch_store(self) -> Any:
        """A `torch.distributed.Store` with the keys of this one and a connection of its own, for process groups."""
        return self._answer(lambda store: _prefixed(store.underlying_store.clone(), self._prefix, _TORCH_SECONDS))

    def set(self, key: str, value: bytes) -> None:
        # torch sends a value and does not wait. The question after it returns when the server has the value.
        self._answer(lambda store: (store.set(key, value), store.check([key])))

    def get(self, key: str, seconds: float) -> bytes:
        deadline, wait = time.monotonic() + seconds, _FIRST_WAIT
        while (value := self._answer(lambda store: _value(store, key))) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{key} was not set within {seconds:g} s")
            time.sleep(min(wait, left))
            wait = min(2 * wait, _LONGEST_WAIT)
        return value

    def has(self, key: str) -> bool:
        return self._answer(lambda store: bool(store.check([key])))

    def add(self, key: str, amount: int) -> int:
        return self._answer(lambda store: int(store.add(key, amount)))

    def delete(self, key: str) -> None:
        self._answer(lambda store: store.delete_key(key))

    def close(self) -> None:
        """Release the store. The process that holds it first waits until the others have closed theirs, 5 s at most."""
        deadline = time.monotonic() + LEAVE_SECONDS
        with suppress(StoreLost):
            self.add("closed", 1)
            while self._holds and self.add("closed", 0) < self.add("opened", 0) and time.monotonic() < deadline:
                time.sleep(_LONGEST_WAIT)
        with self._calling:
            self._lost = self._lost or "the store is closed"
            self._calls.put(None)
            self._store = None

    def _answer(self, call: Callable[[Any], _T], seconds: float | None = None) -> _T:
        """Return the result of a call to torch. Raises StoreLost if the server is gone, now or at an earlier call."""
        answer: Future[_T] = Future()
        with self._calling:
            if self._lost:
                raise StoreLost(self._lost)
            self._calls.put((answer, call, self._store))
        try:
            return answer.result(seconds or ANSWER_SECONDS)
        except TimeoutError:
            self._lost = f"{self.address} has not answered for {seconds or ANSWER_SECONDS:g} s"
        except RuntimeError as error:  # torch's DistError is one
            self._lost = f"{self.address} cannot be reached: {str(error).splitlines()[0]}"
        raise StoreLost(self._lost)


def _make_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (item := calls.get()) is not None:
        answer, call, store = item
        try:
            answer.set_result(call(store))
        except BaseException as error:
            answer.set_exception(error)
        del item, answer, call, store  # a closed store must not live on here


def _value(store: Any, key: str) -> bytes | None:
    with suppress(_torch().DistStoreError):  # deleted since the check
        return bytes(store.get(key)) if store.check([key]) else None
    return None


def _reached(address: Address, seconds: float) -> str:
    """Return the numeric address of a host as soon as its port accepts a connection. Raises ConfigError otherwise.

    torch tries it too, but prints pages of warnings while it does.
    """
    deadline = time.monotonic() + seconds
    while True:
        limit = min(max(deadline - time.monotonic(), 0.1), _LONGEST_ATTEMPT)
        try:
            with socket.create_connection((address.host, address.port), timeout=limit) as connection:
                return str(connection.getpeername()[0])
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or str(error)
                raise ConfigError(
                    f"{address} cannot be reached within {seconds:g} s: {why}. Is it running, and does no firewall "
                    f"stand between? {address.remedy}"
                ) from None
        time.sleep(0.1)


def _opened(host: str, port: int, listening: socket.socket | None, prefix: str, seconds: float) -> Any:
    client = _torch().TCPStore(
        host,
        port,
        is_master=listening is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    return _prefixed(client, prefix, 1)  # it never waits for a key, except for one that was just deleted


def _prefixed(client: Any, prefix: str, seconds: float) -> Any:
    client.set_timeout(timedelta(seconds=seconds))
    return _torch().PrefixStore(prefix, client)


def _torch() -> Any:
    import torch.distributed

    return torch.distributed
