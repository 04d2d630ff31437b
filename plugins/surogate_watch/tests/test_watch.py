"""Runs are shown as their files say: state, plan against now, and what a resumed run replaces."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from surogate import run
from surogate_core.api import ConfigError
from surogate_watch.command import Watched
from surogate_watch.runs import RunFiles, find_runs
from surogate_watch.screen import screen, sparkline

ROOT = Path(__file__).parents[3]
PROGRAM = Path(sys.prefix) / "bin/surogate"


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made_up = _module(Path(__file__).parent / "made_up_runs.py")
NOW, write_run = made_up.NOW, made_up.write_run


def test_each_state_is_told_by_the_lock_its_holder_and_the_last_line(tmp_path: Path) -> None:
    made_up.one_of_each(tmp_path)
    states = {path.name: RunFiles(path).read(NOW).state for path in find_runs([tmp_path])}
    assert states == {
        "qwen3-8b-chats": "running",
        "qwen3-8b-nf4": "running",
        "llama-1b-code": "stalled",
        "qwen3-0.6b-texts": "finished",
        "qwen3-4b-first": "stopped",
        "qwen3-4b-second": "killed",
        "qwen3-14b": "starting",
    }


def test_figures_are_those_of_the_last_steps_beside_the_plan(tmp_path: Path) -> None:
    plan = {"tokens_per_second": 20000.0, "device_bytes": 1e9}
    folder = write_run(tmp_path / "a", planned=plan, memory=2 << 30, holder={"pid": os.getpid()})
    found = RunFiles(folder).read(NOW)
    assert (found.step, found.total_steps, len(found.losses)) == (40, 100, 40)
    assert found.tokens_per_second == pytest.approx(16384) and found.planned == plan
    assert found.memory_bytes == 2 << 30 and found.age == pytest.approx(1)
    assert found.seconds_left == pytest.approx(120)
    assert (
        write_run(tmp_path / "b", outputs=True, steps=100) and RunFiles(tmp_path / "b").read(NOW).seconds_left is None
    )


def test_a_holder_on_another_machine_is_judged_by_the_age_alone(tmp_path: Path) -> None:
    holder = {"pid": 2**22 + 1, "host": "node7"}
    found = RunFiles(write_run(tmp_path / "a", holder=holder)).read(NOW)
    assert (found.state, found.holder) == ("running", "process 4194305 on node7")
    assert RunFiles(tmp_path / "a").read(NOW + 300).state == "stalled"


def test_only_new_lines_are_read_and_a_resumed_run_begins_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=3)
    files = RunFiles(folder)
    assert files.read(NOW).step == 3
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    more = lines[-1].replace('"step": 3', '"step": 4')
    with metrics.open("a") as file:
        file.write(more[:20])
    assert files.read(NOW).step == 3  # a part of a line is no line yet
    with metrics.open("a") as file:
        file.write(more[20:])
    assert (files.read(NOW).step, len(files.run.losses)) == (4, 4)
    fresh = tmp_path / "fresh"
    fresh.write_text("".join(lines[:2]))
    os.replace(fresh, metrics)  # as a run that resumes from step 1 does
    assert (files.read(NOW).step, len(files.run.losses)) == (1, 1)


def test_damaged_files_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/run.yaml").write_text("[")
    (tmp_path / "a/metrics.jsonl").write_bytes(b"\x00\x00\n[1]\n{\n")
    (tmp_path / "a/.surogate.lock").write_text("")
    found = RunFiles(tmp_path / "a").read(NOW)
    assert (found.state, found.step, found.holder) == ("starting", 0, "a process")
    assert "starting" in drawn([found])


def test_runs_are_found_three_levels_below_and_missing_folders_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "x/y/z")
    write_run(tmp_path / "x/y/deep/er/still")
    assert find_runs([tmp_path]) == [tmp_path / "x/y/z"]
    assert find_runs([tmp_path / "x/y/z"]) == [tmp_path / "x/y/z"]
    (tmp_path / "run.yaml").write_text("output_dir: x\n")  # a config, which a user starts
    assert find_runs([tmp_path]) == [tmp_path / "x/y/z"]
    (tmp_path / "x/run.yaml").write_text(f"output_dir: {tmp_path / 'x'}\nlog_file: other.jsonl\n")
    assert find_runs([tmp_path]) == [tmp_path / "x"]
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        Watched([tmp_path / "nowhere"])


def drawn(runs: list[object]) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(runs))  # type: ignore[arg-type]
    return console.export_text()


def test_the_table_shows_plan_and_now(tmp_path: Path) -> None:
    made_up.one_of_each(tmp_path)
    text = drawn([RunFiles(path).read(NOW) for path in find_runs([tmp_path])])
    row = next(line for line in text.splitlines() if line.startswith("qwen3-8b-chats"))
    assert all(word in row for word in ("running", "412/1,200", "16.4k", "16.5k", "60.7", "61.2", "26m16s", "1s ago"))
    assert "2 running" in text.splitlines()[-1] and "1 killed" in text.splitlines()[-1]


def test_a_sparkline_has_the_lowest_and_the_highest_bar() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" or sparkline([3.0, 2.0, 1.0]) == "█▄▁"
    assert sparkline([]) == "" and sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(n) for n in range(1000)], 16)) == 16


@pytest.mark.slow
def test_a_real_run_is_shown_with_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 400)
    text = f"model: {ROOT / 'examples/tiny-qwen3'}\nfrom_scratch: true\nmodel_dtype: fp32\nsequence_len: 32\n"
    text += f"max_steps: 2\noutput_dir: {tmp_path / 'runs/tiny'}\nverify_outputs: false\nsave_steps: 0\n"
    (tmp_path / "run.yaml").write_text(
        f"{text}datasets: [{{path: {tmp_path / 'text.txt'}, type: text, sample_by: line}}]\n"
    )
    run.train(run.load(tmp_path / "run.yaml"), lambda line: None)
    done = subprocess.run([PROGRAM, "watch", tmp_path / "runs", "--json"], check=True, capture_output=True, text=True)
    (shown,) = json.loads(done.stdout)["runs"]
    assert (shown["name"], shown["state"], shown["step"]) == ("tiny", "finished", 2)
    assert shown["planned"]["tokens_per_second"] > 0 and shown["planned"]["device_bytes"] > 1e6
    assert shown["loss"] > 0 and shown["tokens_per_second"] > 0


def test_the_command_ends_by_itself_when_piped_and_refuses_a_folder_without_runs(tmp_path: Path) -> None:
    made_up.one_of_each(tmp_path / "runs")
    done = subprocess.run([PROGRAM, "watch", tmp_path / "runs"], check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1 + 7 + 1
    shutil.rmtree(tmp_path / "runs")
    done = subprocess.run([PROGRAM, "watch"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "watch: no run in this folder" in done.stderr


def test_in_a_terminal_it_is_live_until_ctrl_c(tmp_path: Path) -> None:
    made_up.one_of_each(tmp_path / "runs")
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "160", "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen([PROGRAM, "watch", tmp_path / "runs"], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while b"killed" not in shown.rpartition(b"qwen3-8b-chats")[2]:
        shown += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=20) == 0
    assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown  # it draws on a screen of its own, and gives it back


def test_the_picture_of_the_documentation_is_what_the_script_draws() -> None:
    script = _module(ROOT / "docs/watch.py")
    assert (ROOT / "docs/watch.svg").read_text() == script.picture(), "run `python docs/watch.py > docs/watch.svg`"
