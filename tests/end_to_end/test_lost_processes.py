"""A run of several processes ends soon, with one message and one exit status, whatever happens to one of them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from end_to_end.product import environment, records
from end_to_end.several import SECONDS, several

if TYPE_CHECKING:
    from end_to_end.product import Workplace

STEP_3 = r"(?m)^\s*step +3/"

HANG = """
from surogate_core.runtime.worker import Worker
micro_step = Worker.micro_step
def stand_still(self, *batches, index, **which):
    if rank == 1 and index == 11:  # the second micro-step of step 3
        import threading
        threading.Event().wait()
    micro_step(self, *batches, index=index, **which)
Worker.micro_step = stand_still
"""

FULL_DISK = """
import errno
from surogate.checkpoints import hf
write = hf.write_safetensors
def refuse(path, tensors):
    if "step_00000002" not in str(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    write(path, tensors)
hf.write_safetensors = refuse
"""

RAISE = """
from surogate_core.runtime.worker import Worker
micro_step = Worker.micro_step
def broken(self, *batches, index, **which):
    if rank == 1 and index == 9:
        raise RuntimeError("the device fell off the bus")
    micro_step(self, *batches, index=index, **which)
Worker.micro_step = broken
"""


NCCL_HANGS = """
import contextlib, ctypes, dataclasses, torch
from surogate.world import connect
from surogate_core.runtime import nccl
started = connect._started
def soon(processes, *given):
    processes.world = dataclasses.replace(processes.world, join_seconds=1)
    return started(processes, *given)
def library(name, *arguments):
    if name == "ncclGroupEnd":
        ctypes.CDLL(None).sleep(600)
connect._started, nccl.load, nccl.new_identity = soon, lambda: library, lambda library: bytes(128)
connect.choose_transport = lambda *given: "nccl"
torch.cuda.device = lambda index: contextlib.nullcontext()
"""


def test_a_killed_process_is_named_by_the_other_and_earlier_checkpoints_are_complete(workplace: Workplace) -> None:
    with several(workplace, save_steps=2, save_in_background=False) as run:
        run.wait_for(STEP_3)
        run.send(1, signal.SIGKILL)
        assert run.statuses() == [3, -9], run.texts()
        (error,) = run.errors()
        pid = run.pid(1)
        assert re.match(rf"error: process 1 \(rank 1, pid {pid} on .*\) is gone: .* It was at: ", error), error
        named = error.removesuffix(". Stopping.").rpartition("Last complete checkpoint: ")[2]
        assert named in run.checkpoints()[-2:]  # one that was being saved may have become complete since
        assert json.loads((workplace.out / named / "manifest.json").read_text())


def test_if_the_process_with_the_store_is_killed_the_lowest_of_the_others_says_so(workplace: Workplace) -> None:
    with several(workplace, 3) as run:
        run.wait_for(STEP_3)
        run.send(0, signal.SIGKILL)
        assert run.statuses() == [-9, 3, 3], run.texts()
        (error,) = run.errors()
        assert error.startswith(f"error: process 0 (rank 0, pid {run.pid(0)} on ")
        assert "is gone" in error and error in run.log(1) and error in run.log(2)


def test_a_stopped_process_is_named_as_stopped(workplace: Workplace) -> None:
    with several(workplace) as run:
        run.wait_for(STEP_3)
        run.send(1, signal.SIGSTOP)
        assert run.statuses(without=[1]) == [3], run.texts()
        (error,) = run.errors()
        assert f"pid {run.pid(1)} on" in error and "is stopped" in error


def test_a_rank_that_stands_still_is_named_with_its_collective_and_its_function(workplace: Workplace) -> None:
    with several(workplace, fault=HANG, stall_seconds=2, save_steps=2, save_in_background=False) as run:
        assert run.statuses() == [3, 3], run.texts()
        (error,) = run.errors()
        assert re.match(
            r"error: step 3, micro-step 2: rank 1 \(.*, device 0\) has not entered the sum of .*; rank 0 waits for it "
            r"since \d+ s\. Rank 1: in stand_still \(<string>:\d+\)\. Last complete checkpoint: step_00000002\. "
            r"Stopping\. If nothing is wrong, raise stall_seconds \(2\)\.$",
            error,
        ), error
        assert error in run.log(1)


def test_an_error_of_one_process_ends_the_other_with_the_same_status(workplace: Workplace) -> None:
    with several(workplace, fault=RAISE) as run:
        assert run.statuses() == [3, 3], run.texts()
        (error,) = run.errors()
        assert error.startswith("error: process 1 of 2: rank 1 of 2 (device 0) failed: RuntimeError: the device fell")


def test_a_full_disk_at_the_writer_ends_all(workplace: Workplace) -> None:
    with several(workplace, fault=FULL_DISK, save_steps=2) as run:
        assert run.statuses() == [3, 3], run.texts()
        (error,) = run.errors()
        assert "No space left" in error and run.checkpoints() == ["step_00000002"]
        assert "No space left" in run.log(1)


def test_processes_leave_a_start_of_nccl_that_does_not_end(workplace: Workplace) -> None:
    """It is inside of a library, where no signal and no exception of Python reaches it."""
    with several(workplace, fault=NCCL_HANGS, stall_seconds=1) as run:
        assert run.statuses() == [3, 3], run.texts()
        (error,) = run.errors()
        assert error.startswith("error: connecting the ranks: all ranks are in the start of nccl, which does not end")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_any_process_saves_once_and_ends_all(
    workplace: Workplace, number: signal.Signals, status: int
) -> None:
    with several(workplace) as run:
        run.wait_for(STEP_3)
        run.send(1, number)
        assert run.statuses() == [status, status], run.texts()
        (saved,) = run.checkpoints()
        assert int(saved[-8:]) == records(workplace.out, "step")[-1]["step"]
        assert not run.errors()


def test_a_second_signal_ends_all_without_a_save(workplace: Workplace) -> None:
    slow = "from surogate.checkpoints import hf\nhf.write_safetensors = lambda *a: __import__('time').sleep(60)"
    with several(workplace, fault=slow) as run:
        run.wait_for(STEP_3)
        run.send(0, signal.SIGTERM)
        run.wait_for("saving after this step")
        run.send(0, signal.SIGTERM)
        assert run.statuses() == [143, 143], run.texts()
        assert not run.checkpoints()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_ends_all(workplace: Workplace, seed: int) -> None:
    """While processes meet, tokenise, train and save."""
    chance = random.Random(seed)
    with several(workplace, 3, save_steps=1, save_in_background=seed % 2 == 0, join_seconds=15) as run:
        if seed % 3:
            run.wait_for(STEP_3)
        time.sleep(chance.uniform(0, 1.5))
        victim = chance.randrange(3)
        run.send(victim, signal.SIGKILL)
        statuses = run.statuses()
        assert statuses.pop(victim) == -9
        assert set(statuses) <= ({3} if seed % 3 else {2, 3}), run.texts()  # 2: it had not joined
        # Processes that do not know each other yet all say that the store is gone.
        assert len(run.errors()) == 1 or (run.errors() and not seed % 3), run.texts()
        for name in run.checkpoints():
            assert json.loads((workplace.out / name / "manifest.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["a worker", "torchrun"])
def test_under_torchrun_the_store_lives_on_and_every_process_ends(workplace: Workplace, ended: str) -> None:
    """torchrun holds the store, and sends SIGTERM to the other workers as soon as one is gone."""
    workplace.write(max_steps=100_000, per_device_train_batch_size=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    with (
        (workplace.root / "output.txt").open("w+") as output,
        subprocess.Popen(
            [*command, "-m", "surogate.cli", "train", "run.yaml"],
            cwd=workplace.root,
            env=environment(workplace.root),
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as torchrun,
    ):
        deadline = time.monotonic() + SECONDS
        while not (workplace.out / "metrics.jsonl").exists() or len(records(workplace.out, "step")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = [int(pid) for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()]
        if ended == "torchrun":
            torchrun.terminate()
        else:
            os.kill(min(workers), signal.SIGKILL)
        torchrun.wait(SECONDS)
        text = (workplace.root / "output.txt").read_text()
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()], text
        if ended == "torchrun":
            (saved,) = workplace.out.glob("step_????????")
            assert int(saved.name[-8:]) == records(workplace.out, "step")[-1]["step"]
            assert "error:" not in text
        else:
            (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
            assert f"pid {min(workers)} on " in error and "is gone" in error
            assert len(re.findall(r"exitcode +: 3 ", text)) == 2
