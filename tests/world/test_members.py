"""Processes of a run meet: threads stand in for them, and a dict for the store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from surogate_core.api import StoreLost, World
from surogate_core.api.members import Member, join_members
from surogate_core.api.world import LocalStore
from surogate_core.errors import ConfigError


def member(process: int, processes: int = 2, **fields: Any) -> Member:
    fields = {"machine": "a", "devices": [0], "host": "a", "pid": 100 + process, **fields}
    return Member(process=process, processes=processes, **fields)


def met(*members: Member, seconds: float = 20) -> list[World | str]:
    """Return the world of each process, or its error."""
    store = LocalStore()

    def join(me: Member) -> World | str:
        try:
            return join_members(store, me, seconds, "by hand")
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(join, members))


def error_of(*members: Member, seconds: float = 20) -> str:
    """Return the error, which is the same in all processes."""
    (error,) = {str(outcome) for outcome in met(*members, seconds=seconds)}
    return error


def places(worlds: Sequence[World | str]) -> list[tuple[int, Sequence[int], Sequence[int], int]]:
    assert all(isinstance(world, World) for world in worlds), worlds
    return [(w.size, list(w.ranks), w.devices, w.nodes) for w in worlds if isinstance(w, World)]


def test_ranks_follow_the_processes_on_all_machines() -> None:
    members = [member(i, 3, machine="ab"[i % 2], devices=range(2), uuids=[f"{i}.0", f"{i}.1"]) for i in range(3)]
    worlds = met(*members)
    assert places(worlds) == [(6, [0, 1], [0, 1], 2), (6, [2, 3], [0, 1], 2), (6, [4, 5], [0, 1], 2)]
    assert {(w.processes, w.started_by) for w in worlds if isinstance(w, World)} == {(3, "by hand")}
    assert [w.writer for w in worlds if isinstance(w, World)] == [True, False, False]


def test_processes_that_share_a_gpu_share_its_ranks() -> None:
    own = met(*(member(i, uuids=[f"u{i}"], ranks_per_device=2) for i in range(2)))
    assert places(own) == [(4, [0, 1], [0, 0], 1), (4, [2, 3], [0, 0], 1)]
    shared = met(*(member(i, uuids=["u"], ranks_per_device=4) for i in range(2)))
    assert places(shared) == [(4, [0, 1], [0, 0], 1), (4, [2, 3], [0, 0], 1)]
    cpu = met(*(member(i, ranks_per_device=2) for i in range(2)))
    assert places(cpu) == [(4, [0, 1], [0, 0], 1), (4, [2, 3], [0, 0], 1)]


def test_processes_that_share_a_gpu_unasked_are_named() -> None:
    assert error_of(*(member(i, uuids=["GPU-7"]) for i in range(2))) == (
        "by hand: process 0 (pid 100 on a) and process 1 (pid 101 on a) use the same GPU (GPU-7), and ranks_per_gpu is "
        "1. Give each its own GPU, or set ranks_per_gpu: 2."
    )


def test_processes_with_different_numbers_of_ranks_are_named() -> None:
    assert error_of(member(0, devices=[0, 1]), member(1, machine="b", host="b")) == (
        "by hand: process 0 (pid 100 on a) would have 2 ranks, but process 1 (pid 101 on b) 1. Every process must have "
        "equally many: see gpus, ranks_per_gpu and CUDA_VISIBLE_DEVICES."
    )


def test_a_process_that_does_not_come_is_named_by_all() -> None:
    error = error_of(*(member(i, 9, host="ab"[i % 2]) for i in (0, 1, 2, 5, 8)), seconds=1)
    assert error.startswith("by hand: of 9 processes, 0-2, 5, 8 came (on a, b) and 3-4, 6-7 did not within 1 s. Look")


def test_one_index_twice_and_two_sizes_are_refused_by_all() -> None:
    assert "process 1 (pid 1 on a)" in error_of(member(0, 3), member(1, 3, pid=1), member(1, 3, pid=2))
    assert re.match(
        r"by hand: process 0 \(pid 100 on a\) is one of 3, but process 1 \(pid 101 on a\) is one of 4\. Start all with",
        error_of(member(0, 3), member(1, 4)),
    )


def test_the_process_with_the_store_may_end_while_others_join() -> None:
    class Lost(LocalStore):
        def get(self, key: str, seconds: float) -> bytes:
            raise StoreLost("the process of rank 0 at a:5 cannot be reached")

    with pytest.raises(ConfigError, match=r"rank 0 at a:5 cannot be reached, before all processes had joined\. Its"):
        join_members(Lost(), member(1), 1, "by hand")
