"""Several processes train as one run: as threads do, bit for bit, and as one rank but for the order of sums."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.product import environment, losses, records
from end_to_end.several import several, trained
from safetensors.torch import load_file

from surogate import run
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from end_to_end.product import Workplace

TOKENS = ("step", "tokens", "valid_tokens", "epoch", "lr")
"""What a step's record says of its rows."""


ABSENT = """
if rank == 1:
    from surogate_core.errors import ConfigError
    from surogate.training import trainer
    def refuse(*given):
        raise ConfigError("datasets.0: rows.jsonl is not there")
    trainer.load_steps = refuse
"""


SIGNALLED = """
import os, signal
from surogate_core.runtime.worker import Worker
micro_step = Worker.micro_step
def signalled(self, *batches, index, **which):
    if rank == 1 and index == 9:  # the first micro-step of step 3
        os.kill(os.getpid(), signal.SIGTERM)
    micro_step(self, *batches, index=index, **which)
Worker.micro_step = signalled
"""


def alone(workplace: Workplace, **changes: Any) -> Path:
    """Train in this process; return the folder of its outputs."""
    config = workplace.write(**changes)
    loaded = run.load(config)
    run.train(loaded, notice=lambda line: None)
    return Path(loaded.config.output_dir)


def same_tensors(one: Path, other: Path, name: str = "model.safetensors") -> None:
    left, right = load_file(one / name), load_file(other / name)
    assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)


def rows_of(out: Path) -> list[list[Any]]:
    return [[step[key] for key in TOKENS] for step in records(out, "step")]


def test_processes_train_as_threads_do_and_one_of_them_writes(here: Workplace) -> None:
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "eval_steps": 2}
    threads = alone(here, ranks_per_gpu=2, output_dir=str(here.root / "threads"), **keys)
    run = trained(here, by="mpirun", **keys)
    assert losses(threads) == losses(here.out)
    assert [s["norm"] for s in records(threads, "step")] == [s["norm"] for s in records(here.out, "step")]
    same_tensors(threads, here.out)
    evals = [[(e["loss"], e["valid_tokens"]) for e in records(out, "eval")] for out in (threads, here.out)]
    assert evals[0] == [(pytest.approx(loss, rel=1e-6), labels) for loss, labels in evals[1]]
    assert "done, 4 steps" in run.output(0) and run.output(1) == ""
    assert "Open MPI" in run.output(0)
    assert "2 ranks in 2 processes on one machine, connected by gloo" in " ".join(run.output(0).split())
    assert "tokens in" in run.log(1) and not (here.out / "logs" / "rank_00000.log").exists()


def test_a_signal_to_any_process_ends_all_after_the_same_step_and_the_run_goes_on_with_other_ranks(
    here: Workplace,
) -> None:
    """The rows of the steps are those of one uninterrupted rank."""
    keys = {"max_steps": 40, "warmup_steps": 0, "eval_steps": 0, "validation_split_ratio": 0}
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with several(here, 2, SIGNALLED, short=False, by="srun", **keys, **rows) as run:
        assert run.statuses() == [143, 143], run.texts()
    (saved,) = run.checkpoints()
    step = int(saved.removeprefix("step_"))
    assert [r["step"] for r in records(here.out, "step")] == list(range(1, step + 1)) and 3 <= step < 40
    one = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, **keys}
    alone(here, resume_from_checkpoint=True, **one)
    straight = alone(here, output_dir=str(here.root / "straight"), **one)
    assert rows_of(here.out) == rows_of(straight)
    assert losses(here.out) == pytest.approx(losses(straight), rel=1e-4)


def test_a_key_that_differs_in_one_process_stops_all_before_data_are_read(here: Workplace) -> None:
    with several(here, 2, short=False, each=([], ["--set", "learning_rate=1e-4"])) as run:
        assert run.statuses() == [2, 2], run.texts()
    (error,) = run.errors()
    assert error.startswith("error: the processes of this run differ in versions and settings: learning_rate is")
    assert "in process 1" in error and run.output(1) == "" and not list(here.out.glob("*"))


def test_an_error_of_one_process_is_shown_once_and_ends_the_others(here: Workplace) -> None:
    with several(here, 2, ABSENT) as run:
        assert run.statuses() == [2, 2], run.texts()
    assert run.errors() == ["error: process 1 of 2: datasets.0: rows.jsonl is not there"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"lora": True},
        {"recipe": "fp8-hybrid", "model_dtype": None},
        {"optimizer": "normuon"},
        {"optimizer": "normuon", "zero_level": 3},
    ],
    ids=["lora", "fp8", "normuon", "normuon-level-3"],
)
def test_four_ranks_in_two_processes_are_those_of_one(here: Workplace, keys: dict[str, Any]) -> None:
    if "lora" in keys:
        base = alone(here, output_dir=str(here.root / "base"), max_steps=2, warmup_steps=0)
        keys = {**keys, "from_scratch": False, "model": str(base)}
    keys = {**keys, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    threads = alone(here, ranks_per_gpu=4, output_dir=str(here.root / "threads"), **keys)
    trained(here, ranks_per_gpu=2, **keys)
    assert losses(threads) == losses(here.out)
    same_tensors(threads, here.out, "adapter/adapter_model.safetensors" if "lora" in keys else "model.safetensors")


@pytest.mark.slow
def test_torchrun_starts_a_run(workplace: Workplace) -> None:
    config = workplace.write(per_device_train_batch_size=2, max_steps=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "surogate_core"]
    done = subprocess.run(
        [*torchrun, "train", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=workplace.root,
        env=environment(workplace.root),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(records(workplace.root / "out", "step")) == 2
    assert json.loads((workplace.root / "out" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_resume_that_cannot_keep_the_rows_of_a_step_says_what_would(here: Workplace) -> None:
    rows = {"per_device_train_batch_size": 3, "save_steps": 5}
    alone(here, **rows)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 1"):
        alone(here, ranks_per_gpu=2, resume_from_checkpoint=True, **rows)
