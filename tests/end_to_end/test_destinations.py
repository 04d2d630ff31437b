"""Where commands write: never into a checkpoint or the folder of a run, and what a killed command left is its own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import Workplace, assert_refused, contents, invoke, make_workplace

from surogate import run
from surogate.checkpoints import folders, hf, manifest, states
from surogate.cli.external import CORE_COMMANDS, external_commands
from surogate.outputs import folder
from surogate_core.api import destination
from surogate_core.errors import ConfigError


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the outputs of a base, and of an adapter of it with checkpoints."""
    root = tmp_path_factory.mktemp("destinations")
    keys: dict[str, Any] = {"max_steps": 2, "eval_steps": 0, "warmup_steps": 0, "save_steps": 1}
    place = make_workplace(root, **keys, output_dir=str(root / "base"))
    run.train(run.load(place.write()), notice=lambda line: None)
    adapter = {"model": str(root / "base"), "from_scratch": False, "lora": True, "output_dir": str(root / "out")}
    run.train(run.load(place.write(**adapter)), notice=lambda line: None)
    return root


@pytest.fixture
def place(trained: Path, here: Workplace) -> Path:
    """Return a copy of it in which a test may write, with a config of another trainer."""
    (here.root / "foreign.yaml").write_text("base_model: a/b\nmicro_batch_size: 2\nsequence_len: 64\n")
    for name in ("base", "out"):
        shutil.copytree(trained / name, here.root / name)
    return here.root


WRITING: dict[str, list[str]] = {
    "export": ["base/step_00000002", "{target}"],
    "merge": ["out/adapter", "{target}", "--base", "base"],
    "quantize": ["base", "{target}", "--set", "qlora_fp8=true"],
    "train": ["run.yaml", "--set", "output_dir={target}"],
    "pt": ["run.yaml", "--set", "checkpoint_dir={target}"],
    "sft": ["run.yaml", "--set", "log_file={target}/new.jsonl", "--set", "lora=false"],
    "convert": ["foreign.yaml", "--output", "{target}/new.yaml"],
    "new": ["adapter", "{target}/new"],
    "profile": ["run.yaml", "--picture", "{target}/new.png"],
    "plan": ["run.yaml", "--html", "{target}/new.html"],
    "tokenize": ["run.yaml", "--html", "{target}/new.html"],
    "report": ["out", "--html", "{target}/new.html"],
}
WRITES_NOTHING_NAMED = {
    *("plugins", "schema", "doctor", "docs", "verify", "check-serving", "watch", "generate"),
    "chat",  # writes where /save says, in its own tests
    *("plugins test", "plugins trace"),
}


def test_every_command_that_writes_where_it_is_told_is_tried() -> None:
    known = {*CORE_COMMANDS, *external_commands()}
    missing = sorted(known - WRITING.keys() - WRITES_NOTHING_NAMED)
    assert not missing, f"say in WRITING how {missing} are told where to write, or that they are not"


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("target", ["base/step_00000001", "base/step_00000001/new", "out/step_00000002/training_state"])
def test_no_command_writes_into_a_checkpoint(place: Path, here: Workplace, name: str, target: str) -> None:
    here.write(max_steps=1, warmup_steps=0)
    before = contents(place)
    words = [word.format(target=target) for word in WRITING[name]]
    for more in ([], ["--overwrite"]) if name in ("export", "merge", "quantize") else ([],):
        refused = invoke(name, *words, *more)
        assert_refused(refused, "a checkpoint, which its run may delete. Name another place")
        assert contents(place) == before


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_ends_every_command_with_one_line(
    place: Path, here: Workplace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses what is written into a file beyond 100 bytes, so already the small files of a model."""
    here.write(max_steps=1, warmup_steps=0)
    args = [arg.format(target="new") for arg in WRITING[name]]
    args += ["--set", "output_dir=new/run"] if name in ("pt", "sft") else []
    (place / "new").mkdir()
    before = contents(place)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # or modules are left cut
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        done = invoke(name, *args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode in (2, 3), done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "File too large" in last and "Traceback" not in done.stderr
    left = {path: data for path, data in contents(place).items() if path not in before}
    assert not any(str(path).endswith((".safetensors", ".html", ".png")) for path in left)


@pytest.mark.parametrize("name", ["export", "merge", "quantize", "train"])
def test_no_folder_gets_the_name_of_a_checkpoint_in_the_folder_of_a_run(
    place: Path, here: Workplace, name: str
) -> None:
    here.write(max_steps=1, warmup_steps=0)
    words = [word.format(target="base/step_00000009") for word in WRITING[name]]
    assert_refused(invoke(name, *words), "which would take it for its own")
    assert not (place / "base/step_00000009").exists()


@pytest.mark.parametrize("name", ["export", "merge", "quantize"])
@pytest.mark.parametrize("target", ["out", "out/adapter", "other"])
def test_a_model_is_not_mixed_with_a_run_or_an_adapter(place: Path, name: str, target: str) -> None:
    (place / "other").mkdir()
    (place / "other/metrics.jsonl").write_text("")
    before = contents(place)
    words = [word.format(target=target) for word in WRITING[name]]
    for more in ([], ["--overwrite"]):
        assert_refused(invoke(name, *words, *more), "of a run or an adapter", "Name another output folder")
    assert contents(place) == before


def test_a_checkpoint_is_one_whatever_its_folder_is_called(place: Path) -> None:
    other = (place / "base/step_00000001").rename(place / "kept")
    assert destination.is_checkpoint(other) and not destination.is_checkpoint(place / "base")
    shutil.rmtree(other / states.FOLDER)
    assert destination.is_checkpoint(other)
    (other / manifest.MANIFEST).write_text('{"name": "an extension of a browser"}')
    assert not destination.is_checkpoint(other)
    for suffix in (".partial", ".replaced", ".removed"):
        (place / f"step_00000001{suffix}").mkdir()
        with pytest.raises(ConfigError, match=r"is inside of .* a checkpoint"):
            destination.refuse_checkpoint(place / f"step_00000001{suffix}" / "x")


def test_a_link_to_a_checkpoint_is_one(place: Path) -> None:
    (place / "link").symlink_to(place / "base/step_00000001")
    with pytest.raises(ConfigError, match="a checkpoint"):
        destination.refuse_checkpoint(place / "link/new")


def test_the_names_of_a_checkpoint_are_those_of_what_writes_it() -> None:
    own = (manifest.MANIFEST, states.FOLDER, folder.RUN_FILE)
    assert own == (destination.MANIFEST, destination.STATE, destination.RUN_FILE)


def test_an_export_may_have_the_name_of_its_checkpoint_elsewhere(place: Path) -> None:
    for _ in range(2):
        assert invoke("export", "base/step_00000002", "exports/step_00000002", "--overwrite").returncode == 0


# ----------------------------------------------------------------------------------------------------- killed commands


class Killed(BaseException):
    """Ends a command where SIGKILL would, as far as files are concerned."""


@pytest.mark.parametrize(
    ("name", "more"),
    [("export", []), ("export", ["--format", "nvfp4"]), ("merge", []), ("quantize", [])],
    ids=["export", "export-nvfp4", "merge", "quantize"],
)
def test_a_command_that_was_killed_at_any_move_is_repeated_with_the_same_outcome(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: list[str]
) -> None:
    words = [*(word.format(target="new") for word in WRITING[name]), *more]
    assert invoke(name, *words).returncode == 0
    whole = contents(place / "new")
    shutil.rmtree(place / "new")
    replace, moves = Path.replace, len(whole)
    for killed_at in range(moves + 1):
        left = killed_after(moves=killed_at, monkeypatch=monkeypatch)
        with pytest.raises(Killed):
            invoke(name, *words)
        left()
        assert Path.replace is replace
        assert list((place / "new").glob(".saving-*")), "the killed command leaves its folder"
        before = contents(place / "new")
        again = invoke(name, *words)
        if killed_at == moves:  # the model was whole
            assert_refused(again, "is not empty")
            assert {k: v for k, v in contents(place / "new").items() if ".saving" not in k} == whole
        else:
            assert again.returncode == 0, (killed_at, sorted(before), again.stderr)
            assert contents(place / "new") == whole
        shutil.rmtree(place / "new")


def killed_after(moves: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the next save end after that many files are moved, and clean up nothing. Return what undoes this."""
    done, replace, sync = 0, Path.replace, hf.sync

    def counted(self: Path, target: Path) -> Path:
        nonlocal done
        if done == moves:
            raise Killed
        done += 1
        return replace(self, target)

    def synced(path: Path) -> None:
        if done == moves and moves and not list(path.glob(f"{folders.SAVING}*/config.json")):
            raise Killed
        sync(path)

    class Kept:
        def __init__(self, dir: Path, prefix: str) -> None:
            self.name = f"{dir}/{prefix}kept"

        def __enter__(self) -> str:
            os.mkdir(self.name)
            return self.name

        def __exit__(self, *error: object) -> None:
            pass

    with_patches = pytest.MonkeyPatch()
    with_patches.setattr(Path, "replace", counted)
    with_patches.setattr(hf, "sync", synced)
    with_patches.setattr(hf.tempfile, "TemporaryDirectory", Kept)
    return with_patches.undo


def test_a_note_of_moved_files_that_is_damaged_counts_for_nothing(tmp_path: Path) -> None:
    left = tmp_path / ".saving-x"
    left.mkdir()
    for text in ("", "[", "[1]", '{"files": 3}', json.dumps({"last": "config.json", "files": ["a"]})):
        (left / "files.json").write_text(text)
        assert folders.half_moved(tmp_path) == frozenset()
    (left / "config.json").write_text("{}")
    assert folders.half_moved(tmp_path) == {"a"}
