"""Whole runs whose states and weights the host holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from end_to_end.product import make_workplace, records, write_model
from safetensors.torch import load_file

from surogate_core import run

KEYS = ("offload_optimizer=true", "offload_master=true", "offload_weights=1")


def test_a_run_with_offloading_resumes_one_without_and_saves_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dtypes = {"model_dtype": "bf16", "master_dtype": "fp32", "save_in_background": True}
    place = make_workplace(tmp_path, max_steps=4, save_steps=2, eval_steps=0, **dtypes)
    write_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    for output, changes in (
        (straight, ()),
        (resumed, (f"resume_from_checkpoint={straight / 'step_00000002'}", *KEYS)),
    ):
        run.train(run.load(place.write(output_dir=str(output)), changes), notice=lambda line: None)
    losses = [[(r["step"], r["loss"]) for r in records(folder, "step")] for folder in (straight, resumed)]
    assert losses[0][2:] == losses[1]
    files = sorted(path.relative_to(straight) for path in (straight / "step_00000004").rglob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        one, other = load_file(straight / file), load_file(resumed / file)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == [], file
