"""Several ranks, threads on the CPU: the same training as on one, and a quick exit if one fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end.product import environment, losses, records
from safetensors.torch import load_file

from surogate import run
from surogate.world import processes, watch
from surogate_core.errors import RunStopped
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

    from end_to_end.product import Workplace

BF16 = {"model_dtype": "bf16", "param_grad_dtype": "bf16"}
FP8 = {"recipe": "fp8-hybrid", "model_dtype": None}
NVFP4 = {"recipe": "nvfp4", "model_dtype": None}


def quiet(line: str) -> None:
    pass


def trained(workplace: Workplace, name: str, batch: int, accumulation: int, ranks: int = 2, **changes: Any) -> Path:
    out = workplace.root / name
    config = workplace.write(
        output_dir=str(out),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        ranks_per_gpu=ranks,
        max_steps=4,
        eval_steps=2,
        learning_rate=1e-3,
        **changes,
    )
    run.train(run.load(config), notice=quiet)
    return out


def test_two_and_four_ranks_train_like_one_with_the_same_global_batch(here: Workplace) -> None:
    """In fp32 only the order of the sums of gradients differs, as between splits of a batch on one device.

    Evaluations use the same rows too, also if their number is odd.
    """
    alone = trained(here, "alone", 4, 2, ranks=1)
    for name, ranks, batch, accumulation in (
        ("halves", 2, 2, 2), ("once", 2, 4, 1), ("fours", 2, 1, 4), ("four", 4, 1, 2),
    ):  # fmt: skip
        together = trained(here, name, batch, accumulation, ranks)
        assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
        for key, tolerance in (("norm", 1e-4), ("tokens", 0), ("valid_tokens", 0), ("epoch", 0)):
            expected = [step[key] for step in records(alone, "step")]
            assert [step[key] for step in records(together, "step")] == pytest.approx(expected, rel=tolerance), key
        expected = [step["loss"] for step in records(alone, "eval")]
        assert [step["loss"] for step in records(together, "eval")] == pytest.approx(expected, rel=1e-5)
        assert [e["valid_tokens"] for e in records(together, "eval")] == [
            e["valid_tokens"] for e in records(alone, "eval")
        ]


@pytest.mark.parametrize("narrow", [{}, BF16], ids=["fp32", "bf16"])
def test_gloo_and_copies_train_to_equal_losses(here: Workplace, narrow: dict[str, Any]) -> None:
    outs = [trained(here, way, 2, 2, ranks=3, transport=way, **narrow) for way in ("copies", "gloo")]
    assert losses(outs[0]) == losses(outs[1])


@pytest.mark.parametrize("narrow", [{}, BF16, FP8, NVFP4], ids=["fp32", "bf16", "fp8", "nvfp4"])
def test_all_ranks_are_bit_identical(here: Workplace, monkeypatch: pytest.MonkeyPatch, narrow: dict[str, Any]) -> None:
    teams: list[Team] = []
    monkeypatch.setattr(Team, "close", lambda self: teams.append(self))
    out = trained(here, "out", 2, 2, **narrow)
    (team,) = teams
    first, second = (worker.buffers for worker in team._workers)
    assembly = team._workers[0].assembly
    divided = [v for v in assembly.declared if v.role == "grad" and v.room]  # each rank has the sums of its part
    kept = [v for v in assembly.declared if v.role != "input" and v is not assembly.eval_loss and not v.shard]
    kept = [v for v in kept if v not in divided]
    assert {v.role for v in kept} == {"param", "grad", "state"}
    different = [v for v in kept if not torch.equal(first.persistent(v), second.persistent(v))]
    assert not different
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(out / "model.safetensors").values())


def test_a_failing_rank_is_named_and_the_others_are_released(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    micro_step = Worker.micro_step

    def failing(self: Worker, *batches: Any, index: int, **which: Any) -> None:
        if index == 9:  # rank 1 in the third step of two micro-batches on two devices
            raise RuntimeError("the device fell off the bus")
        micro_step(self, *batches, index=index, **which)

    monkeypatch.setattr(Worker, "micro_step", failing)
    began = time.monotonic()
    with pytest.raises(RunStopped, match=r"rank 1 of 2 \(device 0\) failed: RuntimeError: the device fell off the bus"):
        trained(here, "out", 2, 2)
    assert time.monotonic() - began < 20
    assert len(records(here.root / "out", "step")) <= 2


SCRIPT = """
import threading
from surogate.cli import app
from surogate_core.runtime.worker import Worker
from surogate.world import processes, watch

micro_step = Worker.micro_step

def failing(self, *batches, index, **which):
    if index == 9:
        raise RuntimeError("the device fell off the bus")
    if index == 8:
        threading.Event().wait()  # like a driver call that waits for the other device and never returns
    micro_step(self, *batches, index=index, **which)

Worker.micro_step = failing
app.main()
"""


def test_a_dead_rank_ends_the_process_with_3_even_if_another_never_returns(workplace: Workplace) -> None:
    config = workplace.write(per_device_train_batch_size=2, gradient_accumulation_steps=2, ranks_per_gpu=2)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=workplace.root,
        env=environment(workplace.root),
    )
    assert process.stdout is not None
    seen = ""
    while "step 2/" not in " ".join(seen.split()) and (line := process.stdout.readline()):
        seen += line
    out, err = process.communicate(timeout=60)  # the other rank never returns
    assert process.returncode == 3, seen + out + err
    assert err.startswith("error: rank 1 of 2 (device 0) failed: RuntimeError: the device fell off the bus"), err
    assert err.count("\n") == 1 and "Traceback" not in err


def test_a_lost_device_restarts_the_run_from_its_last_checkpoint(workplace: Workplace) -> None:
    """The new process is started without the fault."""
    config = workplace.write(
        per_device_train_batch_size=2,
        ranks_per_gpu=2,
        max_steps=4,
        save_steps=1,
        save_in_background=False,
        max_restarts=1,
    )
    script = SCRIPT.replace("index == 8", "False")
    done = subprocess.run(
        [sys.executable, "-c", script, "train", str(config)],
        capture_output=True,
        text=True,
        cwd=workplace.root,
        env=environment(workplace.root),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restarting from step_00000002 (max_restarts: 0 left)" in done.stdout
    assert "after step 2 of 4" in done.stdout
    assert done.stderr.startswith("error: rank 1 of 2 (device 0) failed: RuntimeError: the device fell off the bus")
    assert [step["step"] for step in records(workplace.out, "step")] == [1, 2, 3, 4]


def test_a_rank_that_stands_still_is_named_with_what_the_other_waits_for(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro_step, over = Worker.micro_step, threading.Event()

    def stand_still(self: Worker, *batches: Any, index: int, **which: Any) -> None:
        if index == 11:  # rank 1 in the second micro-step of step 3
            over.wait()
        micro_step(self, *batches, index=index, **which)

    monkeypatch.setattr(Worker, "micro_step", stand_still)
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(processes, "_STILL_SECONDS", 0.3)
    monkeypatch.setattr(processes, "FIRST_STEP_SECONDS", 1)
    with pytest.raises(RunStopped, match=r"rank 1 \(.*, device 0\) has not entered the sum of .*; rank 0 waits for it"):
        trained(here, "out", 2, 2, stall_seconds=1)
    over.set()
    assert len(records(here.root / "out", "step")) == 2
