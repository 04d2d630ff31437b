"""Two processes with a GPU each: the bits of two threads, and one clear end if one of them is lost."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace, write_model
from end_to_end.several import several, trained
from end_to_end.test_lost_processes import HANG, RAISE, STEP_3
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs, fewer are visible"),
]


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    """Return a workplace with a model whose head_dim the kernels support."""
    place = make_workplace(tmp_path, deterministic="true")
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    return place


@pytest.mark.parametrize("level", [1, 2, 3])
def test_processes_train_the_bits_of_threads(workplace: Workplace, level: int) -> None:
    root, keys = workplace.root, {"max_steps": 8, "zero_level": level, "per_device_train_batch_size": 2}
    done = workplace.surogate("train", workplace.write(output_dir=str(root / "threads"), gpus=2, **keys))
    assert done.returncode == 0, done.stdout + done.stderr
    trained(workplace, output_dir=str(root / "processes"), **keys)
    assert losses(root / "processes") == losses(root / "threads")
    left, right = (load_file(root / name / "model.safetensors") for name in ("threads", "processes"))
    assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_killed_process_is_named_and_earlier_checkpoints_are_complete(workplace: Workplace, graphs: bool) -> None:
    """The other one waits in a collective on its GPU, which a peer that is gone never enters."""
    with several(workplace, save_steps=2, save_in_background=False, use_cuda_graphs=graphs) as run:
        run.wait_for(STEP_3)
        run.send(1, signal.SIGKILL)
        assert run.statuses() == [3, -9], run.texts()
        (error,) = run.errors()
        assert re.match(rf"error: process 1 \(rank 1, pid {run.pid(1)} on .*\) is gone: ", error), error
        named = error.removesuffix(". Stopping.").rpartition("Last complete checkpoint: ")[2]
        assert json.loads((workplace.out / named / "manifest.json").read_text())


def test_an_exception_in_one_process_ends_both(workplace: Workplace) -> None:
    with several(workplace, fault=RAISE) as run:
        assert run.statuses() == [3, 3], run.texts()
        (error,) = run.errors()
        assert "the device fell off the bus" in error


def test_a_rank_that_stands_still_is_named(workplace: Workplace) -> None:
    with several(workplace, fault=HANG, stall_seconds=2) as run:
        assert run.statuses() == [3, 3], run.texts()
        (error,) = run.errors()
        assert "rank 1" in error and "stand_still" in error, error
