"""Processes of a run agree, compare and end together. They are threads here, and their store is in memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from threads_as_processes import quicken, together

from surogate.training.interrupt import Interrupt
from surogate.world import processes as module
from surogate.world import watch
from surogate.world.heartbeat import Heartbeat, _state
from surogate.world.processes import Processes
from surogate_core.api import StoreLost, World
from surogate_core.api.world import CollectiveError, LocalStore
from surogate_core.errors import ConfigError, RunStopped, SurogateError

quick = pytest.fixture(autouse=True)(quicken)


def test_all_processes_get_the_word_of_the_first_and_the_values_of_all() -> None:
    def work(p: Processes) -> Any:
        word = p.share("of 0" if p.world.writer else None, "a word")
        return word, p.gather(p.world.process, "values")

    assert together(3, work) == [("of 0", [0, 1, 2])] * 3


def test_one_process_exchanges_nothing() -> None:
    alone = Processes(World())
    assert alone.share("x", "a word") == "x" and alone.gather("y", "values") == ["y"]
    alone.compare("settings", {"a": "1"})
    assert alone.world.store._values == {}  # type: ignore[attr-defined]


def test_keys_of_past_calls_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEETING", 8)
    store = LocalStore()

    def work(p: Processes) -> list[int]:
        return [p.share(i if p.world.writer else None, "a step") for i in range(100)]

    assert together(2, work, store) == [[*range(100)]] * 2
    assert len(store._values) < 3 * 8


def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` as a busy machine makes it."""

    def late(*given: Any) -> Any:
        time.sleep(0.1)
        return call(*given)

    return late


def test_a_fact_that_differs_stops_all_and_names_the_odd_process() -> None:
    def work(p: Processes) -> None:
        if p.world.process == 2:
            p._get = slowly(p._get)  # type: ignore[method-assign]
        p.compare("versions", {"torch": "2.11", "acme": "0.2" if p.world.process == 1 else "0.1"})

    errors = together(3, work)
    assert {str(error) for error in errors} == {
        "the processes of this run differ in versions: acme is 0.2 in process 1, 0.1 in the others. Make them equal, "
        "so that all train the same model."
    }
    assert all(isinstance(error, ConfigError) for error in errors)
    assert [error.told for error in errors] == [False, True, True]


def test_the_error_of_a_process_ends_the_others_and_the_writer_shows_it() -> None:
    def work(p: Processes) -> None:
        if p.world.process == 2:
            raise RunStopped("the disk is full")
        p.barrier("the next step")

    errors = together(3, work)
    assert [str(error) for error in errors] == [
        *["process 2 of 3: the disk is full"] * 2, "the disk is full",
    ]  # fmt: skip
    assert [error.told for error in errors] == [False, True, True]
    assert {error.exit_code for error in errors} == {RunStopped.exit_code}


def test_the_error_of_the_writer_is_shown_by_the_writer_alone() -> None:
    def work(p: Processes) -> None:
        if p.world.writer:
            raise ConfigError("no such file")
        p.barrier("the next step")

    errors = together(2, work)
    assert [(str(e), e.told, e.exit_code) for e in errors] == [
        ("no such file", False, 2), ("process 0 of 2: no such file", True, 2),
    ]  # fmt: skip


def test_a_process_that_does_not_come_is_named_with_what_it_has_not_reached() -> None:
    def work(p: Processes) -> None:
        if p.world.process == 1:
            threading.Event().wait(1.0)
            p.check()
        else:
            p.gather(None, "the end of an evaluation", seconds=0.2)

    first, second = together(2, work)
    assert str(first) == "process 1 of 2 has not reached the end of an evaluation within 0.2 s. The others wait for it."
    assert str(second) == f"process 0 of 2: {first}"


def test_if_the_store_is_gone_every_process_says_so_itself() -> None:
    class Lost(LocalStore):
        def has(self, *given: Any) -> bool:
            raise StoreLost("the process of rank 0 at node:29500 is gone")

        get = set = add = has  # type: ignore[assignment]

    errors = together(2, lambda p: p.barrier("the next step"), Lost())
    assert all("rank 0 at node:29500 is gone" in str(error) and not error.told for error in errors)


def test_a_process_that_ends_after_its_store_is_lost_is_known_to_be_gone() -> None:
    """A killed process closes its connections before it counts as ended, which takes long on a busy machine."""
    child, store = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]), LocalStore()
    beat = Heartbeat(count=1, at="step 5", limit=60, pid=child.pid, born=_state(child.pid)[1])
    store.set("alive/0", beat.encoded())
    p = Processes(World(size=2, processes=2, process=1, ranks=range(1, 2), store=store))
    assert p._watch is not None
    while p._watch._peers[0].beat is None:
        time.sleep(0.01)

    def lost(*given: Any) -> Any:
        raise StoreLost("the connection was closed")

    store.set = store.get = store.has = store.add = lost  # type: ignore[method-assign]
    threading.Timer(0.5, child.kill).start()
    assert p._watch.found.wait(30)
    assert f"pid {child.pid} on" in str(p.failure) and "is gone: it was killed" in str(p.failure)
    p._watch.end()
    child.wait()


@pytest.mark.parametrize("late", [False, True])
def test_what_frees_a_waiting_rank_is_called_when_another_process_fails_or_has_failed(late: bool) -> None:
    registered = threading.Event()

    def work(p: Processes) -> None:
        if p.world.process == 1:
            assert late or registered.wait(30)
            raise RunStopped("broken")
        if late:
            assert p._watch is not None and p._watch.found.wait(30)
        freed = threading.Event()
        p.on_failure(freed.set)
        registered.set()
        assert freed.wait(30)
        p.check()

    assert isinstance(together(2, work)[0], SurogateError)


def test_a_signal_at_any_process_is_agreed_on_for_the_same_step() -> None:
    """Process 2 is asked to save before step 3 and to stop before step 6."""

    def work(p: Processes) -> tuple[list[int], list[int], int]:
        interrupt, saved, stopped = Interrupt(p), [], []
        for step in range(20):
            if p.world.process == 2 and step == 3:
                interrupt._handle_save(signal.SIGUSR1, None)
            if p.world.process == 2 and step == 6:
                interrupt._handle(signal.SIGTERM, None)
            interrupt.agree()
            if interrupt.take_save_request():
                saved.append(step)
            if interrupt.requested:
                stopped.append(step)
                break
            p.barrier("the step")  # as collectives do
        return saved, stopped, interrupt.exit_code

    results = together(3, work)
    assert results == [results[0]] * 3
    (saved,), (stopped,), code = results[0]
    assert saved in (3, 4) and stopped in (6, 7) and code == 143


def test_a_run_that_one_process_stops_ends_on_all_after_the_same_step_and_not_by_a_signal() -> None:
    def work(p: Processes) -> tuple[int, int]:
        interrupt = Interrupt(p)
        for step in range(20):
            if p.world.process == 0 and step == 4:
                interrupt.stop()
            interrupt.agree()
            if interrupt.ends_steps():
                break
            p.barrier("the step")
        return step, interrupt.exit_code

    results = together(3, work)
    assert results == [results[0]] * 3 and results[0][0] in (4, 5) and results[0][1] == 0


def test_after_another_process_has_failed_a_signal_ends_at_once() -> None:
    def work(p: Processes) -> None:
        if p.world.process == 1:
            raise RunStopped("broken")
        interrupt, deadline = Interrupt(p), time.monotonic() + 10
        while p.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        interrupt._handle(signal.SIGTERM, None)
        raise AssertionError("it would save")

    assert str(together(2, work)[0]) == "process 1 of 2: broken"


def test_a_signal_that_comes_while_the_cause_is_sought_does_not_hide_it() -> None:
    def work(p: Processes) -> None:
        if p.world.process == 1:
            time.sleep(0.3)
            raise RunStopped("broken")
        assert p._watch is not None
        wait, waited = p._watch.found.wait, []

        def interrupted(seconds: float) -> bool:
            waited.append(seconds)
            if len(waited) == 1:
                raise SystemExit(143)
            return wait(seconds)

        p._watch.found.wait = interrupted  # type: ignore[method-assign]
        raise RuntimeError("the connection was closed") from CollectiveError("closed by the peer")

    assert str(together(2, work)[0]) == "process 1 of 2: broken"


def test_a_process_that_ends_slowly_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the watch's patience ended between the error and the report of its cause."""
    interrupted: list[int] = []
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(watch, "interrupt_main", interrupted.append)
    monkeypatch.setattr(watch.os, "_exit", lambda status: time.sleep(60))  # on a thread that is left behind

    def work(p: Processes) -> None:
        if p.world.process == 1:
            raise RunStopped("broken")
        p.log = lambda line: time.sleep(0.15)  # in which the watch would have interrupted it
        p.barrier("the other")

    assert str(together(2, work)[0]) == "process 1 of 2: broken"
    assert interrupted == []


def test_a_signal_of_the_watch_that_is_on_its_way_does_not_hide_the_cause() -> None:
    def work(p: Processes) -> None:
        if p.world.process == 1:
            raise RunStopped("broken")
        assert p._watch is not None
        calm, calls = p._watch.stop_interrupting, []

        def late() -> None:
            calm()
            calls.append(None)
            if len(calls) == 1:
                raise SystemExit(143)

        p._watch.stop_interrupting = late  # type: ignore[method-assign]
        p.barrier("the other")

    assert str(together(2, work)[0]) == "process 1 of 2: broken"
