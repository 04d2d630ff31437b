"""Checkpoints are written beside the steps: one at a time, of the weights of their step, and told when whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from surogate_core.checkpoint import writer as saving
from surogate_core.checkpoint.progress import Progress
from surogate_core.checkpoint.writer import BackgroundSaves, ForegroundSaves, open_saves
from surogate_core.errors import RunStopped
from surogate_core.reporting import console
from surogate_core.runtime.host_copy import NoHostMemory


class Values:
    """A worker whose one value is a number, and the copy of it."""

    def __init__(self) -> None:
        self.now, self.copy = 0, 0
        self.buffers: Any = self

    def persistent(self, value: Any) -> Any:
        return self.now

    def view(self, value: Any) -> Any:
        return self.copy

    def snapshot(self) -> None:
        self.copy = self.now

    def allocate_snapshot(self, values: Any) -> Any:
        return self

    def settle(self) -> None: ...
    def wait(self) -> None: ...


class Writer:
    """Writes when it is let; what it wrote are (step, tokens, value)."""

    def __init__(self) -> None:
        self.may, self.begun = threading.Event(), threading.Event()
        self.wrote: list[tuple[int, int, Any]] = []
        self.error: BaseException | None = None

    def __call__(self, step: int, progress: Progress, view: Callable[[Any], Any]) -> Path:
        self.begun.set()
        assert self.may.wait(30)
        if self.error:
            raise self.error
        self.wrote.append((step, progress.tokens, view(None)))
        return Path(f"step_{step:08d}")


class Given:
    def __init__(self) -> None:
        self.values, self.writer, self.told = Values(), Writer(), list[str]()
        copied: Any = self.values
        self.saves = BackgroundSaves(copied, copied, self.writer, self.told.append)


def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_told_when_whole() -> None:
    given, progress = Given(), Progress(tokens=100)
    given.values.now = 7
    given.saves.save(50, progress)
    given.values.now, progress.tokens = 8, 200
    assert given.writer.begun.wait(30)
    given.saves.poll()
    assert not given.writer.wrote and not given.told
    given.writer.may.set()
    given.saves.wait()
    assert given.writer.wrote == [(50, 100, 7)]
    (line,) = given.told
    assert line.startswith("saved step_00000050 in ")
    given.saves.wait()
    assert len(given.told) == 1


def test_a_save_waits_for_the_one_before_and_says_so() -> None:
    given = Given()
    given.saves.save(50, Progress())
    given.values.now = 1
    threading.Timer(0.1, given.writer.may.set).start()
    given.saves.save(51, Progress())
    given.saves.wait()
    assert [(step, value) for step, _, value in given.writer.wrote] == [(50, 0), (51, 1)]
    assert [line.split(" in ")[0].split(" waited ")[0] for line in given.told] == [
        "saved step_00000050",
        "step 51",
        "saved step_00000051",
    ]
    assert "larger save_steps" in given.told[1]


@pytest.mark.parametrize("where", ["look", "save", "wait"])
def test_what_the_writer_could_not_do_is_raised_in_the_loop(where: str) -> None:
    given = Given()
    given.writer.error = RunStopped("No space left")
    given.saves.save(50, Progress())
    given.writer.may.set()
    if where == "look":
        given.saves._under_way.future.exception(30)  # type: ignore[union-attr]
    with pytest.raises(RunStopped, match="No space left"):
        given.saves.save(60, Progress()) if where == "save" else getattr(given.saves, where)()
    given.saves.wait()
    assert not given.told and not given.writer.wrote


def test_an_interrupt_of_the_wait_ends_it_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C: nobody waits for the disk again on the way out."""
    given = Given()
    given.saves.save(50, Progress())

    def interrupted(timeout: Any = None) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(given.saves._under_way.future, "result", interrupted)  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        given.saves.wait()
    given.saves.wait()
    given.saves.close()
    given.writer.may.set()


def test_without_a_thread_training_waits() -> None:
    values, writer, told = Values(), Writer(), list[str]()
    writer.may.set()
    saves = open_saves(values, [], writer, told.append, wanted=False)  # type: ignore[arg-type]
    assert isinstance(saves, ForegroundSaves)
    saves.save(50, Progress(tokens=3))
    assert writer.wrote == [(50, 3, 0)] and told[0].startswith("saved step_00000050 in ")


def test_too_little_host_memory_is_told_and_training_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    values: Any = Values()
    monkeypatch.setattr(saving, "available_memory_bytes", lambda: 3 << 30)
    value: Any = type("V", (), {"nbytes": 1 << 30})
    assert isinstance(open_saves(values, [value] * 2, Writer(), told.append, wanted=True), BackgroundSaves)
    assert not told
    assert isinstance(open_saves(values, [value] * 3, Writer(), told.append, wanted=True), ForegroundSaves)
    assert told.pop() == (
        "saves stop the training while they write: copies of what is saved would take 3.0 GiB of host memory, and "
        "3.0 GiB are free"
    )

    def refused(values: Any) -> Any:
        raise NoHostMemory("they cannot be pinned (the driver's cuMemHostRegister fails with 2)")

    values.allocate_snapshot = refused
    assert isinstance(open_saves(values, [value], Writer(), told.append, wanted=True), ForegroundSaves)
    assert "cannot be pinned" in told.pop()


def test_a_reader_who_went_away_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`surogate train run.yaml | head`: the pipe may be found closed by the word that a checkpoint is saved."""
    silenced: list[Any] = []
    monkeypatch.setattr(console, "silence", silenced.append)

    def broken(line: str) -> None:
        raise BrokenPipeError

    values, writer = Values(), Writer()
    writer.may.set()
    for saves in (ForegroundSaves(values, writer, broken), BackgroundSaves(values, values, writer, broken)):  # type: ignore[arg-type]
        saves.save(50, Progress())
        saves.wait()
    assert len(writer.wrote) == len(silenced) == 2


def test_after_an_error_nothing_more_is_written() -> None:
    given = Given()
    given.writer.error = RunStopped("No space left")
    given.writer.may.set()
    given.saves.save(50, Progress())
    with pytest.raises(RunStopped):
        given.saves.wait()
    given.saves.save(60, Progress())
    with pytest.raises(CancelledError):
        given.saves.wait()
