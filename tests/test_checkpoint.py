"""`step_*` directories are complete or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from surogate.checkpoints.folders import list_checkpoints, prune_checkpoints, remove_leftovers, save_checkpoint
from surogate_core.errors import RunStopped


def writes(text: str) -> Callable[[Path], None]:
    def save(directory: Path) -> None:
        (directory / "config.json").write_text(text)
        (directory / "nested").mkdir()
        (directory / "nested" / "state").write_text(text)

    return save


def fails(error: BaseException) -> Callable[[Path], None]:
    def save(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise error

    return save


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "run"
    seen: list[str] = []

    def save(directory: Path) -> None:
        writes("new")(directory)
        seen.extend(names(out))

    assert save_checkpoint(out, 50, save) == out / "step_00000050"
    assert seen == ["step_00000050.partial"]
    assert names(out) == ["step_00000050"]
    assert (out / "step_00000050/nested/state").read_text() == "new"


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    for step in (100, 50, 123456789):
        save_checkpoint(tmp_path, step, writes("x"))
    (tmp_path / "step_00000070.partial").mkdir()
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_00000080").write_text("a file")
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000050", "step_00000100", "step_123456789"]
    assert list_checkpoints(tmp_path / "absent") == []


def test_pruning_never_removes_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, writes("x"))
    assert prune_checkpoints(tmp_path, 0) == []
    assert [p.name for p in prune_checkpoints(tmp_path, 2)] == ["step_00000010"]
    prune_checkpoints(tmp_path, 1)
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["step_00000030"]


def test_a_checkpoint_replaces_an_older_one_of_its_step(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writes("old"))
    path = save_checkpoint(tmp_path, 10, writes("new"))
    assert (path / "config.json").read_text() == "new"
    assert names(tmp_path) == ["step_00000010"]


def test_a_full_disk_stops_the_run_and_names_what_is_safe(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(RunStopped, match="No checkpoint is complete yet"):
        save_checkpoint(tmp_path, 10, fails(full))
    safe = save_checkpoint(tmp_path, 10, writes("complete"))
    with pytest.raises(RunStopped) as stopped:
        save_checkpoint(tmp_path, 20, fails(full))
    assert str(safe) in str(stopped.value)
    assert "step_00000020" in str(stopped.value)
    assert "No space left" in str(stopped.value)
    assert names(tmp_path) == ["step_00000010"], "the half-written one is removed"


def test_a_failed_save_keeps_the_older_checkpoint_of_its_step(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writes("old"))
    for error in (KeyboardInterrupt(), ValueError("a bug")):
        with pytest.raises(type(error)):
            save_checkpoint(tmp_path, 10, fails(error))
    assert names(tmp_path) == ["step_00000010"]
    assert (tmp_path / "step_00000010/config.json").read_text() == "old"


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writes("complete"))
    for name in ("step_00000020.partial", "step_00000010.replaced", "step_00000005.removed", ".saving-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    kept = tmp_path / "notes.partial"
    kept.mkdir()
    assert len(remove_leftovers(tmp_path)) == 4
    assert names(tmp_path) == ["notes.partial", "step_00000010"]
    assert remove_leftovers(tmp_path / "absent") == []


def test_a_checkpoint_is_restored_when_the_run_is_killed_while_replacing_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 10, writes("old")).rename(tmp_path / "step_00000010.replaced")
    (tmp_path / "step_00000010.partial").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step_00000010"]
    assert (tmp_path / "step_00000010/config.json").read_text() == "old"
