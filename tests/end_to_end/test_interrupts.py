"""Signals: the first one finishes the step, saves and exits; the second exits immediately; files stay complete."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from end_to_end.product import EXAMPLES, records
from safetensors.torch import load_file

from surogate_core import run
from surogate_core.checkpoint.progress import Progress
from surogate_core.train import loop

if TYPE_CHECKING:
    from end_to_end.product import Workplace

pytestmark = pytest.mark.slow

AT_ONCE_SECONDS = 5.0


def start_and_wait_for(workplace: Workplace, config: Path, words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a run and read its output up to the line that contains `words`. Runs of blanks count as one."""
    process = workplace.start("train", config)
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in " ".join(line.split()):
            return process, seen
    raise AssertionError(f"the run ended before {words!r}:\n{seen}")


def end(process: subprocess.Popen[str]) -> tuple[str, float]:
    """Return the rest of the output and the seconds until the process ended. Kill it if it does not end."""
    began = time.monotonic()
    try:
        rest, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    return rest, time.monotonic() - began


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_it_and_exits(workplace: Workplace, number: signal.Signals, code: int) -> None:
    process, _ = start_and_wait_for(workplace, workplace.write(max_steps=100_000), "step 3/")
    process.send_signal(number)
    rest, _ = end(process)
    assert process.returncode == code, rest
    assert "Traceback" not in rest
    last = records(workplace.out, "step")[-1]["step"]
    (saved,) = workplace.out.glob("step_*")
    assert saved.name == f"step_{last:08d}"
    assert f"{number.name}: saving after this step; a second signal stops at once" in rest
    assert f"interrupted after step {last} of 100,000; saved: {saved}" in rest
    assert len(load_file(saved / "model.safetensors")) == 24
    assert {path.name for path in workplace.out.iterdir()} == {saved.name, "metrics.jsonl", "loss.png", "run.yaml"}
    again = workplace.write(model=str(saved), from_scratch=False, max_steps=2, output_dir=str(workplace.root / "on"))
    assert workplace.surogate("train", again).returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_exits_immediately(workplace: Workplace, number: signal.Signals, code: int) -> None:
    """A step has a thousand micro-steps and takes more than ten seconds. The test waits for one line only."""
    config = workplace.write(gradient_accumulation_steps=2000, per_device_train_batch_size=8, max_steps=2)
    process, _ = start_and_wait_for(workplace, config, "in total")
    deadline = time.monotonic() + 30
    while not (workplace.out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)  # from the opened loggers to the loop, which handles the signals
    process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None, "the first signal lets the step go on"
    process.send_signal(number)
    rest, seconds = end(process)
    assert process.returncode == code, rest
    assert seconds < AT_ONCE_SECONDS
    assert "Traceback" not in rest
    assert not list(workplace.out.glob("step_*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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
    deadline = time.monotonic() + 30
    while not any(cache.rglob("*.lock")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    rest, seconds = end(process)
    assert process.returncode == code, rest
    assert seconds < AT_ONCE_SECONDS
    assert rest == ""
    assert not workplace.out.exists()
    left = {path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert not [path for path in left if path.parent.name != "columns"], (
        "the counts of columns, which are complete before, are the only files"
    )


def start_and_load(workplace: Workplace, config: Path, library: str) -> subprocess.Popen[str]:
    """Start a run and wait until it has loaded a library."""
    process = workplace.start("train", config)
    maps = Path(f"/proc/{process.pid}/maps")
    deadline = time.monotonic() + 30
    while library not in maps.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(("loaded", "delay"), [("_pydantic_core", 0.0), ("libtorch", 0.0), ("libtorch", 0.6)])
def test_a_signal_while_loading_exits_cleanly(
    workplace: Workplace, loaded: str, delay: float, number: signal.Signals, code: int
) -> None:
    """From the first library that our code loads. Before that the interpreter handles the signal."""
    process = start_and_load(workplace, workplace.write(max_steps=100_000), loaded)
    time.sleep(delay)
    process.send_signal(number)
    rest, seconds = end(process)
    assert process.returncode == code, rest
    assert "Traceback" not in rest
    assert seconds < AT_ONCE_SECONDS


@pytest.mark.parametrize("loaded", ["_pydantic_core", "libtorch"])
def test_sigusr1_while_loading_says_that_there_is_nothing_to_save(workplace: Workplace, loaded: str) -> None:
    process = start_and_load(workplace, workplace.write(max_steps=2), loaded)
    process.send_signal(signal.SIGUSR1)
    rest, _ = end(process)
    assert process.returncode == 0, rest
    assert "SIGUSR1: no steps are being taken, so there is nothing to save" in rest
    assert not list(workplace.out.glob("step_*")) and len(records(workplace.out, "step")) == 2


def test_a_signal_in_the_last_evaluation_still_saves_the_run(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = loop.evaluate

    def interrupted(job: loop.Job, progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        evaluate(job, progress)

    monkeypatch.setattr(loop, "evaluate", interrupted)
    done = run.train(run.load(here.write(max_steps=3)), notice=lambda line: None)
    assert done.signal_exit == 143
    assert (done.checkpoint_dir / "step_00000003/model.safetensors").exists()


def test_a_signal_while_the_final_model_is_saved_is_ignored(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_core.checkpoint import hf

    save_model = hf.save_model

    def interrupted(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save_model(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(hf, "save_model", interrupted)
    done = run.train(run.load(here.write(max_steps=3)), notice=lambda line: None)
    assert done.signal_exit == 0
    assert (here.out / "model.safetensors").exists()


def test_a_run_killed_during_a_save_leaves_complete_checkpoints_and_the_next_run_cleans_up(
    workplace: Workplace,
) -> None:
    config = workplace.write(max_steps=100_000, save_steps=1, save_total_limit=3)
    process, _ = start_and_wait_for(workplace, config, "step 6/")
    process.kill()
    process.communicate()
    whole = sorted(workplace.out.glob("step_????????"))
    assert 2 <= len(whole) <= 4
    for checkpoint in whole:
        assert len(load_file(checkpoint / "model.safetensors")) == 24
    (workplace.out / "step_00000099.partial").mkdir()
    done = workplace.surogate("train", workplace.write(max_steps=2, overwrite_output_dir=True))
    assert done.returncode == 0, done.stderr
    assert "removed step_00000099.partial, left by a save that was killed" in done.stdout
    assert not list(workplace.out.glob("*.partial"))
