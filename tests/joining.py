"""Processes that join a run by their environment variables, and that a test then tells what to do.

They are forked from a server that has imported torch, so that a test with several of them is quick.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from surogate_core.api import JoinContext, World
from surogate_core.errors import SurogateError
from surogate_core.plugins.discovery import load_registry

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "joining", "surogate_launch_env.join"])

SECONDS = 180.0
"""Longest answer of a process."""


def join(environment: Mapping[str, str], seconds: float, **here: Any) -> World:
    """Return the world of this process, joined by the launcher `env` as the registry has it."""
    launcher = load_registry().launcher("env")
    place = JoinContext(environment=environment, **{"device_count": 1, "on_gpu": False, **here})
    return launcher.join(place, launcher.options(join_seconds=seconds))


def shown(world: World) -> str:
    """Return a world on a line."""
    return (
        f"rank {world.ranks.start} to {world.ranks.stop - 1} of {world.size}, devices {list(world.devices)}, "
        f"process {world.process} of {world.processes} on {world.nodes} machines, by {world.started_by}"
    )


class Joining:
    """A process that joins. outcome: its world on a line, or the error."""

    def __init__(self, environment: Mapping[str, str], seconds: float, here: Mapping[str, Any]) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, dict(environment), seconds, dict(here)))
        self.process.start()
        theirs.close()

    def begin(self) -> None:
        self._connection.send(None)

    @property
    def outcome(self) -> str:
        return self.answer()

    def call(self, method: str, *args: Any) -> Any:
        """Return the result of a method of the process's store; its error as "Type: message"."""
        self.ask(method, *args)
        return self.answer()

    def ask(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def answer(self) -> Any:
        assert self._connection.poll(SECONDS), "the process does not answer"
        return self._connection.recv()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, "the process does not end"


def _serve(connection: Connection, environment: dict[str, str], seconds: float, here: dict[str, Any]) -> None:
    load_registry()
    connection.send(None)
    connection.recv()
    try:
        world = join(environment, seconds, **here)
    except SurogateError as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(shown(world))
    with contextlib.suppress(EOFError):
        while (item := connection.recv()) is not None:
            method, args = item
            try:
                connection.send(getattr(world.store, method)(*args))
            except Exception as error:
                connection.send(f"{type(error).__name__}: {error}")
    world.store.close()


@contextlib.contextmanager
def joining(*environments: Mapping[str, str], seconds: float = 20, **here: Any) -> Iterator[list[Joining]]:
    """Yield a process for each environment, and end them afterwards. They join at the same time."""
    processes = [Joining(environment, seconds, here) for environment in environments]
    try:
        for process in processes:
            process.answer()
        for process in processes:
            process.begin()
        yield processes
    finally:
        for process in reversed(processes):  # the one with the store last
            process.end()


def main() -> None:
    """Join by the environment of this process, exchange a word with all others, and print the world."""
    world = join(os.environ, 60)
    word = os.environ["WORD"]
    world.store.set(f"word of {world.process}", word.encode())
    words = {world.store.get(f"word of {process}", 30).decode() for process in range(world.processes)}
    print(f"{shown(world)}, {sorted(words)}", flush=True)
    world.store.close()


if __name__ == "__main__":
    main()
