"""Signals: the first one finishes the step, saves and exits; the second exits immediately; files stay complete."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from end_to_end.product import EXAMPLES, invoke, records
from safetensors.torch import load_file

from surogate import run
from surogate.training import evaluation
from surogate.training.job import Job

if TYPE_CHECKING:
    from end_to_end.product import Workplace

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 120.0
"""A process that has not ended by then hangs. No claim depends on it: the machine may be loaded."""


def start_and_wait_for(workplace: Workplace, config: Path, words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a run and read its output up to the line that contains `words`. Runs of blanks count as one."""
    process = workplace.start("train", config)
    return process, read_until(process, words)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Read the output of a run up to the line that contains `words`, and return it."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in " ".join(line.split()):
            return seen
    raise AssertionError(f"the run ended before {words!r}:\n{seen}")


def end(process: subprocess.Popen[str]) -> str:
    """Return the rest of the output after the process has ended. Kill it if it does not end."""
    try:
        rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    return rest


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait until a running process has reached a state that can be seen from outside."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended or hangs"
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_finishes_the_step_saves_it_and_exits(here: Workplace, number: signal.Signals, code: int) -> None:
    process, _ = start_and_wait_for(here, here.write(max_steps=100_000), "step 3/")
    process.send_signal(number)
    rest = end(process)
    assert process.returncode == code, rest
    assert "Traceback" not in rest
    last = records(here.out, "step")[-1]["step"]
    (saved,) = here.out.glob("step_*")
    assert saved.name == f"step_{last:08d}"
    assert f"{number.name}: saving after this step; a second signal stops at once" in rest
    assert f"interrupted after step {last} of 100,000; saved: {saved}" in rest
    assert len(load_file(saved / "model.safetensors")) == 24
    assert {path.name for path in here.out.iterdir()} == {
        saved.name,
        "metrics.jsonl",
        "plan.json",
        "loss.png",
        "run.yaml",
    }
    again = here.write(model=str(saved), from_scratch=False, max_steps=2, output_dir=str(here.root / "on"))
    assert invoke("train", again).returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_second_signal_exits_immediately(workplace: Workplace, number: signal.Signals, code: int) -> None:
    """The first one lets a step of 150 micro-steps, a second or more, go on to a save. After the second one nothing is
    saved. The first comes within a step: between two of them the save would be done before the second."""
    config = workplace.write(gradient_accumulation_steps=150, per_device_train_batch_size=2, max_steps=100)
    process, _ = start_and_wait_for(workplace, config, "step 1/")
    began = time.monotonic()
    read_until(process, "step 2/")
    time.sleep((time.monotonic() - began) / 4)
    process.send_signal(number)
    read_until(process, "a second signal stops at once")
    process.send_signal(number)
    rest = end(process)
    assert process.returncode == code, rest
    assert "Traceback" not in rest
    assert not list(workplace.out.glob("step_*"))
    assert "saved" not in rest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_tokenizing_exits_cleanly_and_leaves_no_incomplete_cache(
    workplace: Workplace, number: signal.Signals, code: int
) -> None:
    text = (EXAMPLES / "data/tinyshakespeare.txt").read_text()
    long = workplace.root / "long.txt"
    long.write_text(text * 40)
    process, _ = start_and_wait_for(
        workplace, workplace.write(datasets=[{"path": str(long), "type": "text"}]), "GiB planned"
    )
    cache = workplace.root / "cache"
    wait_until(process, lambda: any(cache.rglob("*.lock")))
    process.send_signal(number)
    rest = end(process)
    assert process.returncode == code, rest
    anew = "datasets.0: interrupted; no shard was finished, so nothing is kept: the next run starts anew\n"
    before = "\ninterrupted\n" if number == signal.SIGINT else ""
    assert rest in (before, f"{anew}{before}")  # the first one before its first rows are read
    assert not workplace.out.exists()
    left = {path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert not [path for path in left if path.parent.name != "columns"], (
        "the counts of columns, which are complete before, are the only files"
    )


def start_and_load(workplace: Workplace, config: Path, library: str) -> subprocess.Popen[str]:
    """Start a run and wait until it has loaded a library."""
    process = workplace.start("train", config)
    maps = Path(f"/proc/{process.pid}/maps")
    wait_until(process, lambda: library in maps.read_text())
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize(("loaded", "delay"), [("_pydantic_core", 0.0), ("libtorch", 0.0), ("libtorch", 0.6)])
def test_a_signal_while_loading_exits_cleanly(
    workplace: Workplace, loaded: str, delay: float, number: signal.Signals, code: int
) -> None:
    """From the first library that our code loads. Before that the interpreter handles the signal. The run would take
    hours."""
    process = start_and_load(workplace, workplace.write(max_steps=100_000), loaded)
    time.sleep(delay)
    process.send_signal(number)
    rest = end(process)
    assert process.returncode == code, rest
    assert "Traceback" not in rest


@pytest.mark.parametrize("loaded", ["_pydantic_core", "libtorch"])
def test_sigusr1_while_loading_says_that_there_is_nothing_to_save(workplace: Workplace, loaded: str) -> None:
    process = start_and_load(workplace, workplace.write(max_steps=2), loaded)
    process.send_signal(signal.SIGUSR1)
    rest = end(process)
    assert process.returncode == 0, rest
    assert "SIGUSR1: no steps are being taken, so there is nothing to save" in rest
    assert not list(workplace.out.glob("step_*")) and len(records(workplace.out, "step")) == 2


def test_a_signal_in_the_last_evaluation_still_saves_the_run(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = evaluation.evaluate

    def interrupted(job: Job) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        evaluate(job)

    monkeypatch.setattr(evaluation, "evaluate", interrupted)
    done = run.train(run.load(here.write(max_steps=3)), notice=lambda line: None)
    assert done.signal_exit == 143
    assert (done.checkpoint_dir / "step_00000003/model.safetensors").exists()


@pytest.mark.parametrize(("ratio", "code"), [(0.0, 0), (0.1, 130)])
def test_a_signal_while_the_final_model_is_saved_cuts_nothing_but_the_evaluation_after_it(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, ratio: float, code: int
) -> None:
    from surogate.checkpoints import hf

    save_model = hf.save_model

    def interrupted(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save_model(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(hf, "save_model", interrupted)
    done = run.train(run.load(here.write(max_steps=3, validation_split_ratio=ratio)), notice=lambda line: None)
    assert done.signal_exit == code and (here.out / "model.safetensors").exists()


def test_a_run_killed_during_a_save_leaves_complete_checkpoints_and_the_next_run_cleans_up(
    here: Workplace,
) -> None:
    config = here.write(max_steps=100_000, save_steps=1, save_total_limit=3)
    process, _ = start_and_wait_for(here, config, "step 6/")
    process.kill()
    process.communicate()
    whole = sorted(here.out.glob("step_????????"))
    assert 2 <= len(whole) <= 4
    for checkpoint in whole:
        assert len(load_file(checkpoint / "model.safetensors")) == 24
    (here.out / "step_00000099.partial").mkdir()
    done = invoke("train", here.write(max_steps=2, overwrite_output_dir=True))
    assert done.returncode == 0, done.stderr
    assert "removed step_00000099.partial, left by a save that was killed" in done.stdout
    assert not list(here.out.glob("*.partial"))
