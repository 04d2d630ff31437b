"""The locks on the folders that commands write to."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from surogate.checkpoints import folder_lock
from surogate.checkpoints.folder_lock import LOCK, locked
from surogate_core.errors import ConfigError

HOLDER = """
import sys
from pathlib import Path
from surogate.checkpoints.folder_lock import locked
from surogate_core.errors import ConfigError
try:
    with locked({Path(name): "" for name in sys.argv[1:]}, print):
        print("held", flush=True)
        sys.stdin.readline()
except ConfigError as error:
    print(error)
    sys.exit(2)
"""


def start(*folders: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, *map(str, folders)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("attempts", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_of_processes_that_start_at_once_exactly_one_holds_both_folders_and_the_other_names_it(
    tmp_path: Path, attempts: int
) -> None:
    for attempt in range(attempts):
        a, b = tmp_path / f"{attempt}" / "a", tmp_path / f"{attempt}" / "b"
        pair = start(a, b), start(b, a)
        lines = [first_line(process) for process in pair]
        assert lines.count("held") == 1, lines
        holder = pair[lines.index("held")]
        said = lines[1 - lines.index("held")]
        assert f"is in use by process {holder.pid} (host " in said and "since " in said
        for process in pair:
            process.communicate("\n")
        assert sorted(process.returncode for process in pair) == [0, 2]


def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    killed = start(tmp_path)
    assert first_line(killed) == "held"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert (tmp_path / LOCK).exists()
    said: list[str] = []
    with locked({tmp_path: ""}, said.append):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert said == [] and list(tmp_path.iterdir()) == []


def test_one_folder_under_two_names_is_locked_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    refused = pytest.raises(ConfigError, match="in use by process")
    with locked({tmp_path / "real": "", tmp_path / "link": ""}, print), refused, locked({tmp_path / "link": ""}, print):
        pass


def test_a_refused_command_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no data"), locked({tmp_path / "new" / "er": ""}, print):
        raise ConfigError("no data")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, how: int) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    said: list[str] = []
    with locked({tmp_path: ""}, said.append):
        pass
    assert said == [
        f"{tmp_path}: the file system has no locks (No locks available): a second run in this folder would not be "
        "refused"
    ]


@pytest.mark.parametrize("began", ['"x"', "NaN", "1e300", "null", "[]", '"' + "9" * 400 + '"'])
@pytest.mark.parametrize("held", [False, True])
def test_a_lock_file_with_a_time_that_is_none_names_its_holder_without_it(
    tmp_path: Path, began: str, held: bool
) -> None:
    said: list[str] = []
    content = f'{{"pid": 1, "host": "{"far" * 100}", "time": {began}}}'
    if not held:
        (tmp_path / LOCK).write_text(content)
        with locked({tmp_path: ""}, said.append):
            pass
    else:
        with locked({tmp_path: ""}, print):
            (tmp_path / LOCK).write_text(content)
            with pytest.raises(ConfigError, match="in use by process 1") as refused, locked({tmp_path: ""}, print):
                pass
        said = [str(refused.value)]
    assert f"process 1 (host {('far' * 100)[:64]})" in said[0]


def test_a_lock_file_of_100_000_brackets_is_taken(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("[" * 100_000)
    with locked({tmp_path: ""}, print):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_that_another_machine_left_is_taken_with_a_notice(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"pid": 4711, "host": "far", "time": 0.0}))
    said: list[str] = []
    with locked({tmp_path: ""}, said.append):
        pass
    assert "process 4711 (host far, since 19" in said[0] and "make sure that it has ended" in said[0]
