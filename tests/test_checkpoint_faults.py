"""A save is killed, or refused by the disk, at every write, fsync, rename and removal: complete checkpoints survive."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surogate.checkpoints import folders as checkpoint
from surogate.checkpoints.folders import list_checkpoints, prune_checkpoints, remove_leftovers, save_checkpoint
from surogate.checkpoints.manifest import Manifest, list_files, read_manifest, verify_files, write_manifest
from surogate.checkpoints.progress import Progress
from surogate.checkpoints.states import write_state
from surogate.checkpoints.tensor_file import Stored
from surogate.checkpoints.writer import BackgroundWriter
from surogate_core.errors import RunStopped

CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Faults:
    """Counts the file system calls of a save and calls `fault` instead of the `at`-th."""

    def __init__(self, at: int, fault: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.fault, self.seen = at, fault, 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        opened = io.open

        def open_(*args: Any, **kwargs: Any) -> Any:
            file = opened(*args, **kwargs)
            return Written(file, self) if file.writable() else file

        monkeypatch.setattr(io, "open", open_)

    def event(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            self.fault()

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.event()
            return call(*args, **kwargs)

        return counted


class Written:
    """A file that counts its writes. Half of the data is on the disk when a write fails."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, data: Any) -> Any:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._faults.event()
        return self._file.write(data[half:])

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *exit_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fill(step: int) -> Callable[[Path], None]:
    """Return a function that writes a small checkpoint of a step."""

    def save(directory: Path) -> None:
        (directory / "config.json").write_text(f'{{"step": {step}}}')
        tensors = {"a": torch.full((64,), step), "b": torch.ones(8)}
        hashes = write_state(directory, [Stored.of(*pair) for pair in tensors.items()], max_shard_bytes=300)
        assert len(hashes) == 2
        files = list_files(directory, hashes)
        write_manifest(directory, Manifest(step=step, position={}, facts={}, config={}, versions={}, files=files))

    return save


def save_and_prune(directory: Path, step: int, keep: int = 2) -> None:
    save_checkpoint(directory, step, fill(step))
    prune_checkpoints(directory, keep, newest=step)


def in_background(directory: Path, step: int) -> None:
    """`save_and_prune` in a thread, as a run does it. Its error is raised by `wait`."""

    def write(step: int, progress: Progress, view: Any) -> str:
        save_and_prune(directory, step)
        return directory.name

    nothing: Any = SimpleNamespace(snapshot=lambda: None, wait=lambda: None, pieces=None, release=lambda: None)
    writer = BackgroundWriter(nothing, nothing, write, lambda line: None)
    try:
        writer.save(step, Progress())
        writer.wait()
    finally:
        writer.close()


Save = Callable[[Path, int], None]
BY = pytest.mark.parametrize("by", [save_and_prune, in_background])


def complete(directory: Path) -> Iterator[int]:
    """Yield the steps of the checkpoints that have their names, after verifying every file."""
    for path in list_checkpoints(directory):
        manifest = read_manifest(path)
        verify_files(path, manifest)
        assert path.name == f"step_{manifest.step:08d}"
        yield manifest.step


def before(directory: Path) -> None:
    for step in (10, 20):
        save_and_prune(directory, step)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of steps 10 and 20, which is copied for every fault."""
    before(tmp_path / "made")
    return tmp_path / "made"


def count_events(directory: Path, step: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(0, lambda: None, patch)
        save_and_prune(directory, step)
        return faults.seen


@BY
@pytest.mark.parametrize("step", [30, 20], ids=["a new step", "an existing step"])
def test_a_save_killed_at_any_moment_leaves_the_newest_complete_checkpoint_intact(
    made: Path, tmp_path: Path, step: int, by: Save
) -> None:
    """SIGKILL, in another process. Two checkpoints are kept: at least one of them survives every kill."""
    events = count_events(Path(shutil.copytree(made, tmp_path / "counted")), step)
    assert events > 20
    for at in range(1, events + 1):
        directory = Path(shutil.copytree(made, tmp_path / f"killed-{at}"))
        child = os.fork()
        if child == 0:
            Faults(at, lambda: os.kill(os.getpid(), signal.SIGKILL), pytest.MonkeyPatch())
            by(directory, step)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), at
        remove_leftovers(directory)
        steps = list(complete(directory))
        assert 20 in steps, (at, steps)
        assert {path.name for path in directory.iterdir()} == {f"step_{s:08d}" for s in steps}
        save_and_prune(directory, 40)
        assert list(complete(directory))[-1] == 40
        shutil.rmtree(directory)


@BY
@pytest.mark.parametrize("step", [30, 20], ids=["a new step", "an existing step"])
def test_a_disk_full_at_any_moment_ends_the_run_and_loses_nothing(
    made: Path, tmp_path: Path, step: int, by: Save
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    events = count_events(Path(shutil.copytree(made, tmp_path / "counted")), step)
    stopped = 0
    for at in range(1, events + 1):
        directory = Path(shutil.copytree(made, tmp_path / f"full-{at}"))
        with pytest.MonkeyPatch.context() as patch:
            Faults(at, full, patch)
            try:
                by(directory, step)
            except RunStopped as error:
                stopped += 1
                assert error.exit_code == 3 and "No space left" in str(error)
                assert "The newest complete checkpoint is" in str(error)
        assert 20 in complete(directory), at
        remove_leftovers(directory)
        assert 20 in complete(directory), at
        shutil.rmtree(directory)
    assert stopped > 15


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder of a checkpoint is synced before the rename, the folder around it after."""
    synced: list[Path] = []
    sync = checkpoint.sync
    monkeypatch.setattr(checkpoint, "sync", lambda path: (synced.append(path), sync(path)))
    order: list[tuple[str, int]] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *a, **k: (order.append((str(a[1]), len(synced))), rename(*a, **k)))
    path = save_checkpoint(tmp_path, 10, fill(10))
    ((name, at),) = order
    assert name == str(path)
    partial = path.with_name(path.name + ".partial")
    inside = {partial / file.relative_to(path) for file in path.rglob("*")} | {partial}
    assert set(synced[:at]) == inside
    assert synced[at:] == [tmp_path]
