"""Checkpoints are written in the background, one at a time, with the weights of their step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from surogate.checkpoints.progress import Progress
from surogate.checkpoints.writer import BackgroundWriter, ForegroundWriter, open_writer
from surogate.reporting import terminal
from surogate_core.errors import RunStopped
from surogate_core.runtime.host_memory import NoHostMemory


class FakeWorker:
    """A worker with one value, the number `now`."""

    def __init__(self) -> None:
        self.now, self.copied = 0, 0
        self.copies: Any = SimpleNamespace(wait=lambda: None, release=lambda: None, pieces=lambda value: self.copied)

    def pieces(self, value: Any) -> Any:
        return self.now

    def snapshot(self) -> None:
        self.copied = self.now

    def allocate_snapshot(self, values: Any) -> Any:
        return self.copies

    def settle(self) -> None: ...


class FakeWrite:
    """Writes nothing: waits for `may`, then records (step, tokens, value)."""

    def __init__(self) -> None:
        self.may, self.begun = threading.Event(), threading.Event()
        self.wrote: list[tuple[int, int, Any]] = []
        self.error: BaseException | None = None

    def __call__(self, step: int, progress: Progress, view: Callable[[Any], Any]) -> str:
        self.begun.set()
        assert self.may.wait(30)
        if self.error:
            raise self.error
        self.wrote.append((step, progress.tokens, view(None)))
        return f"step_{step:08d}"


class Background:
    """A background writer of fakes."""

    def __init__(self) -> None:
        self.worker, self.write, self.notices = FakeWorker(), FakeWrite(), list[str]()
        worker: Any = self.worker
        self.writer = BackgroundWriter(worker, worker.copies, self.write, self.notices.append)


def test_training_continues_while_a_checkpoint_is_written_and_a_notice_follows() -> None:
    it, progress = Background(), Progress(tokens=100)
    it.worker.now = 7
    it.writer.save(50, progress)
    it.worker.now, progress.tokens = 8, 200
    assert it.write.begun.wait(30)
    it.writer.poll()
    assert not it.write.wrote and not it.notices
    it.write.may.set()
    it.writer.wait()
    assert it.write.wrote == [(50, 100, 7)]
    (line,) = it.notices
    assert line.startswith("saved step_00000050 in ") and line.endswith(" in the background")
    it.writer.wait()
    assert len(it.notices) == 1


def test_a_save_waits_for_the_previous_one_and_gives_notice() -> None:
    it = Background()
    it.writer.save(50, Progress())
    it.worker.now = 1
    threading.Timer(0.1, it.write.may.set).start()
    it.writer.save(51, Progress())
    it.writer.wait()
    assert [(step, value) for step, _, value in it.write.wrote] == [(50, 0), (51, 1)]
    assert [line.split(" in ")[0].split(" waited ")[0] for line in it.notices] == [
        "saved step_00000050",
        "step 51",
        "saved step_00000051",
    ]
    assert it.notices[1].endswith(" for the save of step 50: saving less often avoids it")


@pytest.mark.parametrize("method", ["poll", "save", "wait"])
def test_an_error_of_the_thread_is_raised_by_the_next_call(method: str) -> None:
    it = Background()
    it.write.error = RunStopped("No space left")
    it.writer.save(50, Progress())
    it.write.may.set()
    if method == "poll":
        it.writer._current.future.exception(30)  # type: ignore[union-attr]
    with pytest.raises(RunStopped, match="No space left"):
        it.writer.save(60, Progress()) if method == "save" else getattr(it.writer, method)()
    it.writer.wait()
    assert not it.notices and not it.write.wrote


def test_an_interrupted_wait_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second Ctrl-C nothing waits for the disk again."""
    it = Background()
    it.writer.save(50, Progress())

    def interrupted(timeout: Any = None) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(it.writer._current.future, "result", interrupted)  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        it.writer.wait()
    it.writer.wait()
    it.writer.close()
    it.write.may.set()


def test_after_an_error_nothing_more_is_written() -> None:
    it = Background()
    it.write.error = RunStopped("No space left")
    it.write.may.set()
    it.writer.save(50, Progress())
    with pytest.raises(RunStopped):
        it.writer.wait()
    it.writer.save(60, Progress())
    with pytest.raises(CancelledError):
        it.writer.wait()


def test_in_the_foreground_training_waits_for_a_save() -> None:
    worker, write, notices = FakeWorker(), FakeWrite(), list[str]()
    write.may.set()
    writer = open_writer(worker, [], write, notices.append, background=False, free=0)  # type: ignore[arg-type]
    assert isinstance(writer, ForegroundWriter)
    writer.save(50, Progress(tokens=3))
    assert write.wrote == [(50, 3, 0)] and notices[0].startswith("saved step_00000050 in ")


def test_without_host_memory_for_a_copy_training_waits_and_a_notice_says_why() -> None:
    notices: list[str] = []
    worker: Any = FakeWorker()
    value: Any = SimpleNamespace(nbytes=1 << 30, place="device", shard=None, owner=None)
    part: Any = SimpleNamespace(nbytes=1 << 29, place="device", shard="of two", owner=None)

    def kind(n_values: int, ranks: Sequence[int] = (0,), value: Any = value) -> type:
        values, given = [value] * n_values, {"background": True, "free": 3 << 30, "ranks": ranks}
        return type(open_writer(worker, values, FakeWrite(), notices.append, **given))

    assert kind(2) is kind(2, (0, 1)) is kind(5, (1, 2)) is kind(2, (0, 1), part) is BackgroundWriter and not notices
    assert kind(3, (0, 1), part) is ForegroundWriter and "would take 3.0 GiB" in notices.pop()
    assert kind(3) is ForegroundWriter
    assert notices.pop() == (
        "training waits for each save: copies of the saved tensors would take 3.0 GiB of host memory, and 3.0 GiB are "
        "free"
    )

    def refused(values: Any) -> Any:
        raise NoHostMemory("they cannot be pinned (the driver's cuMemHostRegister fails with 2)")

    worker.allocate_snapshot = refused
    assert kind(1) is ForegroundWriter
    assert "cannot be pinned" in notices.pop()


def test_a_closed_pipe_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`surogate train run.yaml | head`: the notice of a save may be the first line that finds the pipe closed."""
    silenced: list[Any] = []
    monkeypatch.setattr(terminal, "silence", silenced.append)

    def broken(line: str) -> None:
        raise BrokenPipeError

    worker, write = FakeWorker(), FakeWrite()
    write.may.set()
    for writer in (ForegroundWriter(worker, write, broken), BackgroundWriter(worker, worker.copies, write, broken)):  # type: ignore[arg-type]
        writer.save(50, Progress())
        writer.wait()
    assert len(write.wrote) == len(silenced) == 2
