"""The report of a run that stands still names who is late, what the others wait for, and where it is."""

from __future__ import annotations

from typing import Any

from surogate.world.heartbeat import Heartbeat, Peer, RankAt
from surogate.world.watch import numbered, stall_report

SUM = "the sum of gradients of block 17"


def peers(*beats: Heartbeat, idle: float = 61) -> dict[int, Peer]:
    found = {}
    for process, beat in enumerate(beats):
        found[process] = Peer()
        found[process].hear(beat.encoded(), 0)
        found[process].silent = idle
    return found


def beat(ranks: list[RankAt], at: str = "step 812", limit: float = 60, **given: Any) -> Heartbeat:
    return Heartbeat(count=1, at=at, limit=limit, ranks=ranks, **{"host": "a", "machine": "a", "pid": 17, **given})


def rank(number: int, *, inside: bool, name: str = SUM, host: str = "") -> RankAt:
    return RankAt(rank=number, device=number % 4, micro_step=3, name=name, inside=inside, host=host)


def test_a_rank_that_has_not_entered_a_collective_is_named() -> None:
    first = beat([rank(number, inside=True) for number in range(4)], checkpoint="step_00000800")
    late = rank(5, inside=False, host="load (loader.py:12)", name="the sum of loss")
    second = beat([rank(4, inside=True), late, rank(6, inside=True), rank(7, inside=True)], host="b")
    assert stall_report(peers(first, second), 60) == (
        f"step 812, micro-step 3: rank 5 (b, device 1) has not entered {SUM}; ranks 0-4, 6-7 wait for it since 61 s. "
        "Rank 5: in load (loader.py:12). Last complete checkpoint: step_00000800. Stopping. If nothing is wrong, raise "
        "stall_seconds (60)."
    )


def test_ranks_that_are_all_in_one_collective_point_to_the_link() -> None:
    report = stall_report(peers(beat([rank(0, inside=True)]), beat([rank(1, inside=True)])), 60)
    assert f"all ranks are in {SUM}, which does not end: look at what connects them, since 61 s." in report


def test_ranks_in_different_collectives_are_told_apart() -> None:
    report = stall_report(peers(beat([rank(0, inside=True)]), beat([rank(1, inside=True, name="the loss")])), 60)
    assert f"rank 0 is in {SUM}; rank 1 is in the loss since 61 s." in report


def test_a_process_that_the_others_wait_for_between_collectives_is_named() -> None:
    waiting = beat([], at="step 5", waits="the next step")
    report = stall_report(peers(waiting, beat([], at="saving step 4", limit=600), waiting), 60)
    assert report == (
        "saving step 4: process 1 (pid 17 on a) has not reached the next step; processes 0, 2 wait for it since 61 s. "
        "No checkpoint is known to be complete. Stopping."
    )


def test_without_a_wait_every_process_is_told() -> None:
    report = stall_report(peers(beat([], at="step 5"), beat([], at="step 6")), 60)
    assert "no process has come further (process 0: step 5; process 1: step 6) since 61 s." in report


def test_numbers_are_shortened() -> None:
    assert numbered("rank", [5]) == "rank 5"
    assert numbered("rank", [0, 1, 2, 7]) == "ranks 0-2, 7"
    assert numbered("process", [1, 3]) == "processes 1, 3"
