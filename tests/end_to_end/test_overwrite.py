"""Two runs are never mixed in one folder, and what an earlier one has left is never deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from end_to_end.product import records

from surogate_core import run
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from end_to_end.product import Workplace


def go(config: Path, *overrides: str) -> list[str]:
    told: list[str] = []
    run.train(run.load(config, overrides), notice=told.append)
    return told


@pytest.mark.parametrize("key", ["output_dir", "checkpoint_dir"])
def test_a_new_run_where_an_earlier_one_was_saved_is_refused_with_what_to_do(here: Workplace, key: str) -> None:
    for step in (2, 50):
        (here.out / f"step_{step:08d}").mkdir(parents=True)
    config = here.write(**{"max_steps": 2, "output_dir": "new", key: str(here.out)})
    with pytest.raises(ConfigError) as refused:
        go(config)
    told = str(refused.value)
    assert f"{key}: {here.out} holds checkpoints of an earlier run (step_00000002 to step_00000050)" in told
    for remedy in ("resume_from_checkpoint: true", f"another {key}", "overwrite_output_dir: true"):
        assert remedy in told
    assert not (here.root / "new").exists() and not (here.out / "metrics.jsonl").exists()


def test_the_key_sets_aside_checkpoints_and_records_and_deletes_nothing(here: Workplace) -> None:
    config = here.write(max_steps=3, save_steps=1, save_total_limit=1)
    go(config)
    before = (here.out / "step_00000003/model.safetensors").read_bytes()
    recorded = (here.out / "metrics.jsonl").read_bytes()
    told = go(config, "overwrite_output_dir=true", "train_seed=7", "max_steps=2")
    assert (here.out / "step_00000003.set_aside/model.safetensors").read_bytes() == before
    assert (here.out / "metrics.jsonl.set_aside").read_bytes() == recorded
    assert sorted(path.name for path in here.out.glob("step_*")) == ["step_00000002", "step_00000003.set_aside"]
    assert [record["step"] for record in records(here.out, "step")] == [1, 2]
    assert sum("set aside, since a new run begins" in line for line in told) == 2
    go(config, "resume_from_checkpoint=true", "train_seed=7", "max_steps=2")
    assert sorted(path.name for path in here.out.glob("step_*")) == ["step_00000002", "step_00000003.set_aside"]


@pytest.mark.slow
def test_a_checkpoint_of_elsewhere_does_not_begin_a_run_among_others(here: Workplace) -> None:
    go(here.write(max_steps=2, save_steps=1, output_dir="first"))
    config = here.write(max_steps=2, save_steps=1, resume_from_checkpoint="first/step_00000001")
    go(config)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        go(config)
    assert [record["step"] for record in records(here.out, "step")] == [2]
