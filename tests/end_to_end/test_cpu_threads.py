"""The number of CPU threads decides bits of a run on a CPU, so a resumed run says that it is another one."""

from __future__ import annotations

from dataclasses import replace

import torch
from end_to_end.product import Workplace

from surogate import run
from surogate.checkpoints.manifest import read_manifest, write_manifest

SAID = "resuming with CPU threads (OMP_NUM_THREADS) 2 (saved: 1): not bit-identical to an uninterrupted run"


def go(here: Workplace, steps: int) -> list[str]:
    lines: list[str] = []
    keys = {
        "eval_steps": 0,
        "save_steps": 1,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
        "resume_from_checkpoint": True,
    }
    run.train(run.load(here.write(max_steps=steps, **keys)), notice=lines.append)
    return [line for line in lines if "resuming with" in line]


def test_a_run_that_is_resumed_with_another_number_of_threads_says_so(here: Workplace) -> None:
    assert go(here, 1) == [] and go(here, 2) == []
    torch.set_num_threads(2)
    assert go(here, 3) == [SAID]
    torch.set_num_threads(1)


def test_a_checkpoint_that_does_not_know_its_threads_is_resumed_without_a_word(here: Workplace) -> None:
    go(here, 1)
    step = here.out / "step_00000001"
    manifest = read_manifest(step)
    write_manifest(step, replace(manifest, versions={k: v for k, v in manifest.versions.items() if k != "cpu_threads"}))
    assert go(here, 2) == []
