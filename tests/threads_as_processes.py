"""Processes of a run that are threads of the test: their store is in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from surogate.world import processes as module
from surogate.world import watch
from surogate.world.processes import STALL_SECONDS, Processes
from surogate_core.api import World
from surogate_core.api.world import LocalStore


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes notice each other's failures at once, and none end the process of the test."""
    for name, seconds in (("_POLL", 0.02), ("PATIENCE", 30.0), ("_CAUSE_SECONDS", 2.0)):
        monkeypatch.setattr(module, name, seconds)
    for name, seconds in (("BEAT_SECONDS", 0.02), ("GRACE_SECONDS", 600.0)):
        monkeypatch.setattr(watch, name, seconds)


def together(
    count: int,
    work: Callable[[Processes], Any],
    store: LocalStore | None = None,
    stall_seconds: float = STALL_SECONDS,
    **fields: Any,
) -> list[Any]:
    """Return what `work` returns or raises in each of `count` processes. `fields` are those of every `World`."""
    shared = store or LocalStore()

    def run(process: int) -> Any:
        one = {"size": count, "processes": count, "ranks": range(process, process + 1)}
        processes = Processes(World(**{**one, **fields}, store=shared, process=process), stall_seconds)
        try:
            with processes.ending():
                return work(processes)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
