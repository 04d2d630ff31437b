"""Files that commands write by a fixed name: a link of that name, which anyone can make in a shared folder, is refused
or replaced, and what it points to keeps its content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surogate import run
from surogate.checkpoints.folder_lock import LOCK, locked
from surogate.machine.replaced_file import replaced
from surogate.world.log import ProcessLog
from surogate_core.api import World
from surogate_core.api.regular_file import open_own
from surogate_core.errors import ConfigError, RunStopped

if TYPE_CHECKING:
    from end_to_end.product import Workplace

SECRET = "the content of a file of somebody"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link", "pipe", "folder"])
def test_a_lock_file_is_a_regular_file_of_one_name_or_the_folder_is_refused(
    tmp_path: Path, victim: Path, kind: str
) -> None:
    lock = tmp_path / "out" / LOCK
    lock.parent.mkdir()
    if kind == "link":
        lock.symlink_to(victim)
    elif kind == "link to nothing":
        lock.symlink_to(tmp_path / "new")
    elif kind == "hard link":
        os.link(victim, lock)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(ConfigError, match=r"out: cannot be written to: ") as refused, locked({lock.parent: ""}, print):
        pass
    assert kind == "folder" or LOCK in str(refused.value)
    assert victim.read_text() == SECRET and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", ".saving-run.yaml", "run.yaml", "plan.json", "loss.png", "README.md"]
)
def test_a_run_writes_through_no_link_in_its_output_folder(here: Workplace, victim: Path, name: str) -> None:
    here.out.mkdir()
    (here.out / name).symlink_to(victim)
    loaded = run.load(here.write(max_steps=1, warmup_steps=0, eval_steps=0, save_steps=0, overwrite_output_dir=True))
    if name == "metrics.jsonl":
        victim.write_text("")  # an empty one is no earlier work
        with pytest.raises(ConfigError, match=r"output_dir: cannot write .*metrics\.jsonl is a link"):
            run.train(loaded, notice=lambda line: None)
        assert victim.read_text() == ""
        return
    run.train(loaded, notice=lambda line: None)
    assert victim.read_text() == SECRET
    assert (here.out / name).is_symlink() == (name == "README.md")  # a README that no run has written is the user's


def test_a_log_file_that_the_user_names_may_be_a_link(here: Workplace, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "target.jsonl")
    given = {"max_steps": 1, "warmup_steps": 0, "eval_steps": 0, "save_steps": 0}
    run.train(run.load(here.write(**given, log_file=str(tmp_path / "log.jsonl"))), notice=lambda line: None)
    assert '"log": "step"' in (tmp_path / "target.jsonl").read_text()


def test_the_log_of_a_process_goes_through_no_link(tmp_path: Path, victim: Path) -> None:
    log = ProcessLog(tmp_path, World())
    log.path.parent.mkdir()
    log.path.symlink_to(victim)
    with pytest.raises(OSError, match="is a link"):
        log.open()
    assert victim.read_text() == SECRET


def test_a_file_that_is_replaced_is_written_beside_it_through_no_link(tmp_path: Path, victim: Path) -> None:
    with replaced(tmp_path / "a") as fresh:
        name = fresh.name
    (tmp_path / name).symlink_to(victim)
    with replaced(tmp_path / "a") as fresh:
        fresh.write_text("new")
    assert (tmp_path / "a").read_text() == "new" and victim.read_text() == SECRET


def test_a_file_is_opened_by_its_own_name_with_the_modes_of_any_other(tmp_path: Path) -> None:
    file = open_own(tmp_path / "new", os.O_WRONLY | os.O_APPEND)
    os.write(file, b"1")
    os.close(file)
    assert (tmp_path / "new").read_text() == "1"
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("instead", ["nothing", "a new folder", "a file"])
def test_a_run_whose_output_folder_is_removed_or_replaced_saves_what_it_can_and_says_so(
    here: Workplace, instead: str
) -> None:
    away = here.root / "away"

    def listen(report: object) -> None:
        if here.out.is_dir() and getattr(report, "step", 0) == 2 and not away.exists():
            here.out.rename(away)
            if instead == "a new folder":
                here.out.mkdir()
            elif instead == "a file":
                here.out.write_text("mine")

    loaded = run.load(here.write(max_steps=6, eval_steps=0, save_steps=4))
    with pytest.raises(RunStopped) as stopped:
        run.train(loaded, notice=lambda line: None, listen=listen)
    said = str(stopped.value)
    if instead == "a file":
        assert here.out.read_text() == "mine" and "saving" in said and str(here.out) in said
        return
    assert "metrics.jsonl: was removed" in said and "Resume the run from what is saved" in said
    (saved,) = here.out.glob("step_*")
    assert (saved / "manifest.json").is_file()
    resumed = run.load(here.write(max_steps=6, eval_steps=0, save_steps=4, resume_from_checkpoint=True))
    assert run.train(resumed, notice=lambda line: None).steps == 6
