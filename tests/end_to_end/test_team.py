"""Several devices, simulated by threads on the CPU: the same training as on one, and a quick exit if one fails."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end.product import environment, losses, records
from safetensors.torch import load_file
from teams import pretend

from surogate_core import run
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


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(2, monkeypatch.setattr)


def trained(workplace: Workplace, name: str, batch: int, accumulation: int, **changes: Any) -> Path:
    out = workplace.root / name
    config = workplace.write(
        output_dir=str(out),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=6,
        eval_steps=3,
        learning_rate=1e-3,
        **changes,
    )
    run.train(run.load(config), notice=quiet)
    return out


def test_two_devices_train_like_one_with_the_same_global_batch(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 only the order of the sums of gradients differs, as between splits of a batch on one device.

    Evaluations use the same rows too, also if their number is odd.
    """
    alone = trained(here, "alone", 4, 2)
    pretend(2, monkeypatch.setattr)
    for name, batch, accumulation in (("halves", 2, 2), ("once", 4, 1), ("fours", 1, 4)):
        together = trained(here, name, batch, accumulation)
        assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
        for key, tolerance in (("norm", 1e-4), ("tokens", 0), ("valid_tokens", 0), ("epoch", 0)):
            expected = [step[key] for step in records(alone, "step")]
            assert [step[key] for step in records(together, "step")] == pytest.approx(expected, rel=tolerance), key
        expected = [step["loss"] for step in records(alone, "eval")]
        assert [step["loss"] for step in records(together, "eval")] == pytest.approx(expected, rel=1e-5)
        assert [e["valid_tokens"] for e in records(together, "eval")] == [
            e["valid_tokens"] for e in records(alone, "eval")
        ]


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("narrow", [{}, BF16, FP8, NVFP4], ids=["fp32", "bf16", "fp8", "nvfp4"])
def test_all_ranks_are_bit_identical(here: Workplace, monkeypatch: pytest.MonkeyPatch, narrow: dict[str, Any]) -> None:
    teams: list[Team] = []
    monkeypatch.setattr(Team, "close", lambda self: teams.append(self))
    out = trained(here, "out", 2, 2, **narrow)
    (team,) = teams
    first, second = (worker.buffers for worker in team._workers)
    assembly = team._workers[0].assembly
    kept = [v for v in assembly.declared if v.role != "input" and v is not assembly.eval_loss]
    assert {v.role for v in kept} == {"param", "grad", "state"}
    different = [v for v in kept if not torch.equal(first.persistent(v), second.persistent(v))]
    assert not different
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(out / "model.safetensors").values())


@pytest.mark.usefixtures("two_devices")
def test_a_failing_rank_is_named_and_the_others_are_released(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    micro_step = Worker.micro_step

    def failing(self: Worker, *batches: Any, index: int, **which: Any) -> None:
        if index == 9:  # rank 1 in the third step of two micro-batches on two devices
            raise RuntimeError("the device fell off the bus")
        micro_step(self, *batches, index=index, **which)

    monkeypatch.setattr(Worker, "micro_step", failing)
    began = time.monotonic()
    with pytest.raises(RunStopped, match=r"rank 1 of 2 \(GPU 1\) failed: RuntimeError: the device fell off the bus"):
        trained(here, "out", 2, 2)
    assert time.monotonic() - began < 20
    assert len(records(here.root / "out", "step")) <= 2


SCRIPT = """
import threading
from teams import pretend
from surogate_core.cli import app
from surogate_core.runtime.worker import Worker

pretend(2)
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
    from end_to_end.product import EXAMPLES

    config = workplace.write(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    tests = str(EXAMPLES.parent / "tests")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=workplace.root,
        env=environment(workplace.root, PYTHONPATH=tests),
    )
    assert process.stdout is not None
    seen = ""
    while "step 2/" not in " ".join(seen.split()) and (line := process.stdout.readline()):
        seen += line
    out, err = process.communicate(timeout=60)  # the other rank never returns
    assert process.returncode == 3, seen + out + err
    assert err.startswith("error: rank 1 of 2 (GPU 1) failed: RuntimeError: the device fell off the bus"), err
    assert err.count("\n") == 1 and "Traceback" not in err
