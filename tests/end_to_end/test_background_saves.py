"""Whole runs that write checkpoints in the background."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.product import EXAMPLES, environment, records
from safetensors.torch import load_file

from surogate import run
from surogate.checkpoints import folders as checkpoint
from surogate.checkpoints import saved_run
from surogate_core import train
from surogate_core.errors import RunStopped

if TYPE_CHECKING:
    from end_to_end.product import Workplace

MASTERS = {"model_dtype": "bf16", "master_dtype": "fp32", "optimizer_state_dtype": "bf16", "param_grad_dtype": "bf16"}
MASTERS |= {"optimizer": "adamw"}


def at_step(step: int, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `what` when the loop has finished step `step`."""
    finish = train.finish

    def finished(done: Any, *given: Any) -> float:
        at = finish(done, *given)
        if done.step == step:
            what()
        return at

    monkeypatch.setattr(train, "finish", finished)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_continues_during_a_save_and_the_checkpoint_has_the_bits_of_its_step(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    config = here.write(max_steps=6, save_steps=2, gradient_accumulation_steps=ranks, ranks_per_gpu=ranks, **MASTERS)
    run.train(run.load(config, ["save_in_background=false", "output_dir=waited"]), notice=lambda line: None)

    may, seen = threading.Event(), list[tuple[str, int]]()
    save_checkpoint, printed = checkpoint.save_checkpoint, list[str]()

    def blocked(directory: Path, step: int, save: Any) -> Path:
        assert step != 2 or may.wait(60)
        return save_checkpoint(directory, step, save)

    def let() -> None:
        seen.extend((path.name, 3) for path in here.out.glob("step_*"))
        seen.extend((line, 3) for line in printed if "saved step" in line)
        may.set()

    monkeypatch.setattr(checkpoint, "save_checkpoint", blocked)
    at_step(3, let, monkeypatch)
    run.train(run.load(config), notice=printed.append)
    assert not seen, "nothing was whole, and nothing said to be, when step 3 was done"
    assert [line.split(" in ")[0] for line in printed if line.startswith("saved ")] == [
        "saved step_00000002",
        "saved step_00000004",
        "saved step_00000006",
    ]
    for name in ("step_00000002", "step_00000004", "step_00000006"):
        ours, theirs = here.out / name, here.root / "waited" / name
        files = sorted(path.relative_to(ours) for path in ours.rglob("*") if path.suffix == ".safetensors")
        assert len(files) == 2
        for file in files:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (name, file)


def test_a_full_disk_during_a_background_save_ends_the_run_and_keeps_complete_checkpoints(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `save_total_limit: 1` the older checkpoint is removed only when the newer one is complete."""
    write_manifest = saved_run.write_manifest

    def full(directory: Path, manifest: Any) -> None:
        if manifest.step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        write_manifest(directory, manifest)

    monkeypatch.setattr(saved_run, "write_manifest", full)
    with pytest.raises(RunStopped, match=r"saving .*step_00000004 failed: No space left.*step_00000002.*Free some"):
        run.train(run.load(here.write(max_steps=60, save_steps=2, save_total_limit=1)), notice=lambda line: None)
    assert [path.name for path in here.out.glob("step_*")] == ["step_00000002"]
    assert not (here.out / "model.safetensors").exists()


def test_the_records_of_a_checkpoints_steps_are_on_disk_before_the_checkpoint(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []
    sync, write_manifest = saved_run.sync, saved_run.write_manifest

    def synced(path: Path) -> None:
        order.append((path.name, len(records(here.out, "step"))))
        sync(path)

    def written(directory: Path, manifest: Any) -> None:
        order.append(("manifest", manifest.step))
        write_manifest(directory, manifest)

    monkeypatch.setattr(saved_run, "sync", synced)
    monkeypatch.setattr(saved_run, "write_manifest", written)
    run.train(run.load(here.write(max_steps=3, save_steps=2)), notice=lambda line: None)
    (file, steps), (folder, _), (manifest, step) = order
    assert (file, folder, manifest, step) == ("metrics.jsonl", here.out.name, "manifest", 2)
    assert steps >= 2


SCRIPT = """
import threading
from surogate.checkpoints import folders
from surogate.cli import app

def stuck(*given):
    print("the disk hangs", flush=True)
    threading.Event().wait()

folders.save_checkpoint = stuck
app.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_exits_immediately_even_during_a_save(
    workplace: Workplace, number: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "train", str(workplace.write(max_steps=100_000, save_steps=2))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=workplace.root,
        env=environment(workplace.root, PYTHONPATH=str(EXAMPLES.parent / "tests")),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while "the disk hangs" not in (line := process.stdout.readline()):
        assert line, "the run ended before its first save"
    process.send_signal(number)
    time.sleep(1)
    assert process.poll() is None, "the first signal waits for the save"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)  # the save never returns
    assert process.returncode == code, out
    assert "Traceback" not in out


@pytest.mark.slow
def test_a_signal_waits_for_the_current_save_and_then_saves(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    done = run.train(run.load(here.write(max_steps=60, save_steps=2)), notice=lambda line: None)
    assert done.signal_exit == 143
    saved = sorted(path.name for path in here.out.glob("step_*"))
    assert saved == ["step_00000002", "step_00000003"]
    assert all(load_file(here.out / name / "model.safetensors") for name in saved)
