"""Damaged adapters are trained further and merged, or refused with one error."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from end_to_end.product import Workplace
from fuzzing.mutate import both_sides, of_file, refused, seeds

from surogate import run
from surogate.checkpoints import hf
from surogate.checkpoints.adapter import load_adapter
from surogate.checkpoints.saved_run import model_export
from surogate.runs.run import Run
from surogate_core.machine.devices import cpu
from surogate_core.planning.plan import Plan
from surogate_core.runtime.pieces import Pieces


@pytest.fixture
def adapted(here: Workplace) -> tuple[Run, Plan, Path]:
    """Return a run that trains an adapter further, and the folder of the adapter."""
    folder, base = here.root / "adapter", here.root / "model"
    folder.mkdir()
    config = here.write(from_scratch=False, lora=True, lora_rank=2, adapter_path=str(folder))
    opened = run.open_run(run.load(config))
    plan = run.plan(opened, cpu())
    params = {name: torch.ones(value.shape) for name, value in plan.assembly.params.items()}
    weights = {m.param for m in plan.assembly.weights}
    made = here.root / "made"
    made.mkdir()
    export = model_export(opened, plan, {name: Pieces.of(tensor) for name, tensor in params.items() if name in weights})
    hf.write_model(made, replace(export, dtype="fp32"))
    shutil.rmtree(base)
    made.rename(base)
    assert opened.adapter is not None
    adapter, options = opened.adapter
    adapter.save({v.name: params[v.name] for v in plan.assembly.trainable}, folder, str(base), options)
    return opened, plan, folder


def refusals(opened: Run, plan: Plan, folder: Path, cases: range) -> list[bool]:
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    params = {name: torch.zeros(value.shape) for name, value in plan.assembly.params.items()}
    outcomes = []

    def use() -> None:
        load_adapter(opened, plan.assembly, params)
        shutil.rmtree(folder.parent / "merged", ignore_errors=True)
        run.merge(folder, folder.parent / "merged")

    for seed in cases:
        choice = random.Random(seed)
        name = choice.choice(sorted(whole))
        (folder / name).write_bytes(of_file(folder / name, choice))
        outcomes.append(refused(seed, use))
        (folder / name).write_bytes(whole[name])
    return outcomes


def test_a_damaged_adapter_is_merged_or_refused(adapted: tuple[Run, Plan, Path]) -> None:
    both_sides(refusals(*adapted, seeds(150)))


@pytest.mark.slow
def test_many_damaged_adapters_are_merged_or_refused(adapted: tuple[Run, Plan, Path]) -> None:
    both_sides(refusals(*adapted, seeds(300)))
