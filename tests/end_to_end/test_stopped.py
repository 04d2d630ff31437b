"""Runs that stop themselves on divergence or a full disk: exit code 3, and complete outputs are kept."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.product import invoke, records
from safetensors.torch import load_file

from surogate import run
from surogate_core.errors import RunStopped

if TYPE_CHECKING:
    from end_to_end.product import Workplace


def finite(path: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


def test_a_diverging_run_exits_with_3_and_saves_finite_weights(here: Workplace) -> None:
    config = here.write(learning_rate=1e30, lr_scheduler_type="constant", max_steps=60, max_nonfinite_steps=2)
    done = invoke("train", config)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    steps = records(here.out, "step")
    assert [step.get("skipped", False) for step in steps[-3:]] == [True] * 3
    assert steps[-1]["norm"] is None, "JSON has no word for nan"
    last = steps[-1]["step"]
    assert f"step {last}: " in done.stderr
    printed = " ".join(done.stderr.split())
    assert "max_nonfinite_steps: 2" in printed and "Lower learning_rate" in printed
    assert re.search(rf"repeated op by op: step {last}, micro-step 1: \w+ wrote NaN or inf\. op \d+ of micro_", printed)
    assert re.search(r"run by torch reference of \S+ \S+ wrote \S+:fp32\[.*?(NaN|inf) of .*? first at \[", printed)
    assert finite(here.out / f"step_{last:08d}/model.safetensors")
    assert not (here.out / "model.safetensors").exists()


@pytest.mark.parametrize(("save_steps", "complete"), [(1, "newest complete .*step_00000001"), (0, "no checkpoint is")])
def test_weights_that_are_not_finite_are_never_saved(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, save_steps: int, complete: str
) -> None:
    """The gradient is finite and the update overflows. Neither the checkpoint of the step nor the final model is
    written, although no gradient has shown the fault yet."""
    from surogate_core.runtime.worker import Worker

    here.out.mkdir()
    (here.out / "model.safetensors").write_bytes(b"an earlier model")
    update = Worker.update

    def overflows(self: Worker, *, lr: float, step: int) -> Any:
        return update(self, lr=1e38 if step == 2 else lr, step=step)

    monkeypatch.setattr(Worker, "update", overflows)
    config = here.write(max_steps=2, save_steps=save_steps, weight_decay=1e38, overwrite_output_dir=True)
    with pytest.raises(RunStopped, match=rf"step 2: the weights hold .* {complete}"):
        run.train(run.load(config, ["warmup_steps=0", "learning_rate=1e-42"]), notice=lambda line: None)
    assert [path.name for path in here.out.glob("step_*")] == ["step_00000001"] * bool(save_steps)
    assert (here.out / "outputs.set_aside/model.safetensors").read_bytes() == b"an earlier model"
    assert not (here.out / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_op_that_goes_wrong_first_is_named_with_its_block_and_values(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """A finite weight of block 1 is too large from step 4 on. The second skipped step stops the run."""
    from surogate_core.runtime.worker import Worker

    update = Worker.update

    def broken(self: Worker, *, lr: float, step: int) -> Any:
        reading = update(self, lr=lr, step=step)
        if step == 3:
            self.params()[next(name for name in self.params() if "layers.1" in name and "gate_up" in name)][5] = 3e38
        return reading

    monkeypatch.setattr(Worker, "update", broken)
    config = here.write(max_steps=9, ranks_per_gpu=ranks, gradient_accumulation_steps=2 // ranks, max_nonfinite_steps=1)
    with pytest.raises(RunStopped) as stopped:
        run.train(run.load(config), notice=lambda line: None)
    printed = str(stopped.value)
    assert printed.startswith("step 5: loss or gradient was not finite in 2 steps in a row"), printed
    assert "repeated op by op: step 5, micro-step 1: " in printed
    assert re.search(r"  op       \d+ of micro_\w+: linear, block 1, forward\n", printed), printed
    assert "run by   torch reference of surogate-core" in printed, printed
    assert re.search(r"  wrote    1\.\w+:fp32\[256,256\]\n +\d+ inf of 65,536, first at \[\d+, 5\]", printed), printed
    (saved,) = here.out.glob("step_*")  # a team may have launched one more step
    assert finite(saved / "model.safetensors")
    assert [step["step"] for step in records(here.out, "step") if step.get("skipped")] == [4, 5]


def test_a_fault_that_does_not_repeat_is_reported_as_such(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_core.runtime.worker import Worker

    micro_step, watch, watched = Worker.micro_step, Worker.watch, list[int]()

    def poisoned(self: Worker, batch: Any, *, loss_scale: float, index: int, **which: bool) -> None:
        broken = index == 7 and not watched
        micro_step(self, batch, loss_scale=float("nan") if broken else loss_scale, index=index, **which)

    monkeypatch.setattr(Worker, "micro_step", poisoned)
    monkeypatch.setattr(Worker, "watch", lambda self, make: (watched.append(1), watch(self, make))[1])
    with pytest.raises(RunStopped, match=r"step 4: .*\n.* not found: repeated op by op, the step was finite"):
        run.train(run.load(here.write(max_steps=8, max_nonfinite_steps=0)), notice=lambda line: None)
    assert finite(here.out / "step_00000004/model.safetensors")


def test_a_single_step_with_a_non_finite_gradient_is_skipped_and_training_continues(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surogate_core.runtime.worker import Worker

    micro_step = Worker.micro_step

    def poisoned(self: Worker, batch: Any, *, loss_scale: float, index: int, **which: bool) -> None:
        micro_step(self, batch, loss_scale=float("nan") if index == 7 else loss_scale, index=index, **which)

    monkeypatch.setattr(Worker, "micro_step", poisoned)
    done = run.train(run.load(here.write(max_steps=8)), notice=lambda line: None)
    steps = records(here.out, "step")
    assert [step["step"] for step in steps if step.get("skipped")] == [4]
    assert steps[3]["loss"] is None and done.loss is not None and done.loss < steps[0]["loss"]
    assert finite(here.out / "model.safetensors")


@pytest.fixture
def full_from_step_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the disk full when a checkpoint of step 4 or later, or the final model, is written."""
    from surogate.checkpoints import hf

    write = hf.write_safetensors

    def refuse(path: Path, tensors: Any) -> None:
        if "step_00000002" not in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, tensors)

    monkeypatch.setattr(hf, "write_safetensors", refuse)


@pytest.mark.usefixtures("full_from_step_4")
def test_a_full_disk_stops_the_run_and_keeps_earlier_checkpoints(here: Workplace) -> None:
    with pytest.raises(RunStopped, match=r"No space left.*step_00000002.*Free some space"):
        run.train(run.load(here.write(max_steps=6, save_steps=2)), notice=lambda line: None)
    assert {path.name for path in here.out.iterdir()} == {
        "step_00000002",
        "metrics.jsonl",
        "plan.json",
        "run.yaml",
        "loss.png",
    }
    assert 4 <= len(records(here.out, "step")) <= 6, "the save runs in the background, at most until the next one"
    assert finite(here.out / "step_00000002/model.safetensors")


@pytest.mark.usefixtures("full_from_step_4")
def test_a_full_disk_at_the_final_model_keeps_the_earlier_model(here: Workplace) -> None:
    here.out.mkdir()
    (here.out / "model.safetensors").write_bytes(b"an earlier model")
    (here.out / "config.json").write_text("{}")
    with pytest.raises(RunStopped, match="No space left"):
        run.train(run.load(here.write(max_steps=2, overwrite_output_dir=True)), notice=lambda line: None)
    assert (here.out / "outputs.set_aside/model.safetensors").read_bytes() == b"an earlier model"
    assert (here.out / "outputs.set_aside/config.json").read_text() == "{}"
    assert not (here.out / "config.json").exists()
    assert not list(here.out.glob(".saving-*"))


def test_a_full_disk_at_the_metrics_file_stops_the_run(here: Workplace) -> None:
    """The log file is on a device that is always full. Checkpoints are elsewhere."""
    (here.root / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises((RunStopped, OSError)) as stopped:
        run.train(run.load(here.write(max_steps=6, log_file=str(here.root / "full.jsonl"))), notice=lambda line: None)
    assert isinstance(stopped.value, RunStopped) and "No space left" in str(stopped.value)


def test_a_failing_metrics_file_stops_the_run_after_a_save(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate.reporting.metrics import JsonLinesLogger

    record = JsonLinesLogger.report

    def full(self: JsonLinesLogger, report: Any) -> None:
        if report.step == 3:
            raise RunStopped("metrics.jsonl: cannot write: No space left on device.")
        record(self, report)

    monkeypatch.setattr(JsonLinesLogger, "report", full)
    with pytest.raises(RunStopped, match=r"metrics\.jsonl: cannot write"):
        run.train(run.load(here.write(max_steps=6)), notice=lambda line: None)
    assert finite(here.out / "step_00000003/model.safetensors")


def test_a_full_disk_gives_exit_code_3_and_one_message(workplace: Workplace) -> None:
    """Uses a file system of 300 KiB if one can be mounted here. The tests above cover the message otherwise."""
    import subprocess
    import sys

    from end_to_end.product import environment

    small = workplace.root / "small"
    small.mkdir()
    config = workplace.write(output_dir=str(small / "out"), save_steps=2)
    script = f"mount -t tmpfs -o size=300k none {small} && exec {sys.executable} -m surogate.cli train {config}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(workplace.root),
    )
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.startswith("error: saving ") and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
