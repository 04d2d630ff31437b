"""A team of fake workers: the calls that each rank receives, and how the team ends when a rank fails or blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from surogate_core.errors import ConfigError, RunStopped
from surogate_core.runtime import team as team_module
from surogate_core.runtime.comms.single import SingleComm
from surogate_core.runtime.team import Team
from surogate_core.runtime.threads import RankThread


class FakeComm(SingleComm):
    """A `Comm` that records `abort` and may lose its peers."""

    lost: Exception | None = None

    def __init__(self, rank: int, freed: threading.Event) -> None:
        super().__init__(rank=rank, world_size=2, device=rank)
        object.__setattr__(self, "freed", freed)

    def check(self) -> None:
        if FakeComm.lost:
            raise FakeComm.lost

    def abort(self) -> None:
        self.freed.set()  # type: ignore[attr-defined]


class Reading:
    finished_at = 0.0

    def __init__(self, values: tuple[float, float], ready: Callable[[], bool]) -> None:
        self._values, self._ready = values, ready

    @property
    def ready(self) -> bool:
        return self._ready()

    def values(self) -> tuple[float, float]:
        return self._values


class Fake:
    """The worker of a rank. Records its calls and their threads; a test determines what each call does."""

    behave: dict[str, Callable[[Fake], Any]]
    starts_adapter = False

    def __init__(self, comm: FakeComm, behave: dict[str, Callable[[Fake], Any]]) -> None:
        self.rank, self.behave = comm.rank, behave
        self.freed = comm.freed  # type: ignore[attr-defined]
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[str] = set()
        self._do("make", None)

    def _do(self, name: str, given: Any) -> Any:
        self.calls.append((name, given))
        self.threads.add(threading.current_thread().name)
        return self.behave[name](self) if name in self.behave else None

    def micro_step(self, batch: Any, **named: Any) -> None:
        self._do("micro_step", (batch, named))

    def update(self, **named: Any) -> Reading:
        return self._do("update", named) or Reading((1.0, 2.0), lambda: True)

    def evaluate(self, batch: Any) -> tuple[float, ...]:
        self._do("evaluate", batch)
        return (float(batch),)

    def __getattr__(self, name: str) -> Any:
        if name not in ("connect", "share", "prepare", "begin", "settle", "close"):
            raise AttributeError(name)
        return lambda *given, **named: self._do(name, (given, named))


Make = Callable[..., Team]


@pytest.fixture
def make() -> Iterator[Make]:
    freed = threading.Event()
    teams: list[Team] = []

    def build(**behave: Callable[[Fake], Any]) -> Team:
        teams.append(Team([FakeComm(0, freed), FakeComm(1, freed)], lambda comm: Fake(comm, behave)))  # type: ignore[arg-type, return-value]
        return teams[-1]

    yield build
    FakeComm.lost = None
    freed.set()
    for team in teams:
        team.close()


def names(fake: Any) -> list[str]:
    return [name for name, _ in fake.calls]


def step(team: Team, index: int = 10) -> Any:
    team.micro_step("a", "b", first=True, last=True, loss_scale=0.5, index=index)  # type: ignore[arg-type]
    return team.update(lr=0.1, step=1)


def blocks_until_freed(fake: Fake) -> None:
    assert fake.freed.wait(30), "no abort freed this rank"


def raises(error: Exception) -> Callable[[Fake], Any]:
    def behave(fake: Fake) -> None:
        raise error

    return behave


def of_rank(rank: int, behave: Callable[[Fake], Any], other: Callable[[Fake], Any] | None = None) -> Any:
    return lambda fake: behave(fake) if fake.rank == rank else other(fake) if other else None


def test_each_rank_gets_its_batch_and_index_on_its_own_thread(make: Make) -> None:
    team = make()
    team.start(graphs=False)
    assert step(team).values() == (1.0, 2.0)
    team.settle()
    first, second = team._workers
    assert first.threads.isdisjoint(second.threads) and len(first.threads) == len(second.threads) == 1
    given = {fake.rank: next(g for name, g in fake.calls if name == "micro_step") for fake in (first, second)}
    assert [given[rank][0] for rank in (0, 1)] == ["a", "b"]
    assert [given[rank][1]["index"] for rank in (0, 1)] == [10, 11]
    assert (
        names(first)
        == names(second)
        == ["make", "share", "connect", "prepare", "begin", "micro_step", "update", "settle"]
    )


def test_all_ranks_finish_a_stage_of_the_start_before_any_begins_the_next(make: Make) -> None:
    order: list[str] = []

    def slow(name: str) -> Callable[[Fake], None]:
        def behave(fake: Fake) -> None:
            time.sleep(0.05 * fake.rank)
            order.append(name)

        return behave

    make(**{name: slow(name) for name in ("share", "connect", "prepare", "begin")}).start()
    assert order == ["share", "share", "connect", "connect", "prepare", "prepare", "begin", "begin"]


def test_an_evaluation_is_the_sum_over_the_ranks(make: Make) -> None:
    assert make().evaluate(3.0, 4.0) == (7.0,)  # type: ignore[arg-type]


def test_a_step_is_not_awaited_before_it_is_read(make: Make) -> None:
    gate = threading.Event()
    team = make(micro_step=lambda fake: gate.wait(30))
    reading = step(team)
    assert not reading.ready
    gate.set()
    assert reading.values() == (1.0, 2.0)


@pytest.mark.parametrize("stage", ["make", "connect", "prepare", "begin", "micro_step", "update", "settle", "evaluate"])
def test_a_rank_that_fails_ends_the_run_and_frees_a_rank_that_waits_for_it(make: Make, stage: str) -> None:
    """Detected at the next call or during a wait. Of several failures, the error names the rank that failed first."""
    freed: list[bool] = []

    def fails_later(fake: Fake) -> None:
        freed.append(fake.freed.wait(30))
        raise RuntimeError("only because it was freed")

    with pytest.raises(
        RunStopped, match=r"rank 1 of 2 \(device 1\) failed: ValueError: broken\. .*nothing of the current step"
    ):
        team = make(**{stage: of_rank(1, raises(ValueError("broken")), fails_later)})
        team.start()
        step(team).values()
        team.evaluate(1.0, 2.0)  # type: ignore[arg-type]
        team.settle()
    assert all(freed), "the run ended only after the timeout of the other rank"


def test_a_failed_device_is_detected_by_its_reading(make: Make) -> None:
    """Only the reading queries the device after an error of a kernel. That of rank 0 never becomes ready."""
    never = Reading((0.0, 0.0), lambda: False)

    def fault() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    team = make(update=lambda fake: (never, Reading((0.0, 0.0), fault))[fake.rank])
    with pytest.raises(RunStopped, match=r"rank 1 .*illegal memory access"):
        for reading in (step(team), step(team)):
            while not reading.ready:
                time.sleep(0.01)


def test_a_failed_communicator_ends_the_run_during_the_wait_for_a_reading(make: Make) -> None:
    team = make(update=lambda fake: Reading((0.0, 0.0), lambda: False))
    reading = step(team)
    FakeComm.lost = RuntimeError("remote process exited")
    with pytest.raises(RunStopped, match="remote process exited"):
        reading.values()


def test_a_surogate_error_of_a_rank_is_raised_unchanged(make: Make) -> None:
    with pytest.raises(ConfigError, match="no compiled kernel"):
        make(make=raises(ConfigError("no compiled kernel serves it")))


def test_different_readings_stop_the_run_and_equal_nans_do_not(make: Make) -> None:
    drift = make(update=lambda fake: Reading((1.0, 2.0 + fake.rank * 1e-7), lambda: True))
    with pytest.raises(RunStopped, match=r"the ranks disagree .*rank 1: loss 1\.0, norm 2\.0000001"):
        step(drift).values()
    nan = make(update=lambda fake: Reading((float("nan"), float("inf")), lambda: True))
    assert repr(step(nan).values()) == "(nan, inf)"


def test_close_cancels_queued_calls_frees_all_ranks_and_has_a_timeout(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_module, "CLOSE_SECONDS", 0.5)
    stuck = threading.Event()
    gave_up: list[bool] = []
    team = make(micro_step=of_rank(0, lambda fake: gave_up.append(not stuck.wait(30))))
    step(team)
    while not team._threads[0].busy:
        time.sleep(0.01)
    team.close()
    assert not gave_up, "close waited for the blocked rank"
    first, second = team._workers
    assert "close" in names(second) and "close" not in names(first) and "update" not in names(first)
    assert team._threads[0].busy and not team._threads[1].is_alive()
    stuck.set()
    team._threads[0].join(5)
    assert names(first)[-2:] == ["micro_step", "close"]


def test_after_an_error_a_thread_runs_only_its_last_job() -> None:
    done: list[str] = []
    thread = RankThread("test")
    failed = thread.submit(raises(ValueError("broken")), None)  # type: ignore[arg-type]
    later = thread.submit(done.append, "later")
    wait([failed, later], timeout=5)
    thread.close(last=lambda: done.append("last"))
    thread.join(5)
    assert isinstance(failed.exception(), ValueError) and later.cancelled() and done == ["last"]
    assert thread.failure is not None and thread.failure.error is failed.exception()
