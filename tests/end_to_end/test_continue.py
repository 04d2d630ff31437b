"""Training that continues from the weights of a finished run, and refusal of damaged weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from end_to_end.product import records
from safetensors.torch import load_file, save_file

from surogate import run
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from end_to_end.conftest import Finished
    from end_to_end.product import Workplace


def test_training_continues_from_the_weights_of_a_finished_run(finished: Finished, here: Workplace) -> None:
    """With learning rate 0 the held-out loss is the last one of that run. With a learning rate it falls further."""
    entry = finished.workplace.config["validation_datasets"]
    config = here.write(model=str(finished.out), from_scratch=None, validation_datasets=entry, max_steps=3)
    last = records(finished.out, "eval")[-1]["loss"]
    still = run.train(run.load(config, ["learning_rate=0", "weight_decay=0"]), notice=lambda line: None)
    assert still.evaluations[-1][1] == pytest.approx(last, rel=1e-6)
    assert records(here.out, "step")[0]["loss"] == pytest.approx(records(finished.out, "step")[-1]["loss"], abs=0.2)
    on = run.train(run.load(config, [f"output_dir={here.root / 'on'}"]), notice=lambda line: None)
    assert on.evaluations[-1][1] < last - 0.05


def test_bf16_weights_are_exported_as_bf16_and_can_be_trained_further(here: Workplace) -> None:
    config = here.write(model_dtype="bf16", max_steps=2)
    first = run.train(run.load(config), notice=lambda line: None)
    assert {tensor.dtype for tensor in load_file(here.out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((here.out / "config.json").read_text())["dtype"] == "bfloat16"
    overrides = [f"model={here.out}", "from_scratch=false", "learning_rate=0", "output_dir=again"]
    again = run.train(run.load(config, overrides), notice=lambda line: None)
    assert again.evaluations[-1][1] == first.evaluations[-1][1]


def test_nan_in_the_base_is_named_with_its_file_before_step_one(finished: Finished, here: Workplace) -> None:
    base = here.root / "base"
    base.mkdir()
    for path in (path for path in finished.out.iterdir() if path.is_file()):
        shutil.copyfile(path, base / path.name)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, base / "model.safetensors")
    config = here.write(model=str(base), from_scratch=None, max_steps=1, warmup_steps=0)
    printed = (
        r"base: weights hold NaN or inf.*\n  model\.safetensors: model\.norm\.weight \[\d+\]: 1 NaN of .* at \[3\]"
    )
    with pytest.raises(ConfigError, match=printed):
        run.train(run.load(config), notice=lambda line: None)
    assert not here.out.exists()


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 4096)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _huge_header(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def _missing_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)


def _wrong_shape(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, path)


def _unexpected_tensor(path: Path) -> None:
    save_file({**load_file(path), "model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}, path)


def _integers(path: Path) -> None:
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)


def _pickled(path: Path) -> None:
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "printed"),
    [
        (_truncated, "truncated or corrupt"),
        (_garbage, "truncated or corrupt"),
        (_empty, "truncated or corrupt"),
        (_huge_header, "truncated or corrupt"),
        (_missing_tensor, "lacks model.layers.1.mlp.up_proj.weight"),
        (_wrong_shape, "model.norm.weight is [65], expected [64]"),
        (_unexpected_tensor, "model.layers.2.mlp.up_proj.weight"),
        (_integers, "I8"),
        (_pickled, "pickled"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(
    damage: Callable[[Path], None], printed: str, finished: Finished, here: Workplace
) -> None:
    model = here.root / "damaged"
    shutil.copytree(finished.out, model, ignore=shutil.ignore_patterns("step_*"))
    damage(model / "model.safetensors")
    config = here.write(model=str(model), from_scratch=False)
    with pytest.raises(ConfigError) as refused:
        run.train(run.load(config), notice=lambda line: None)
    assert printed in str(refused.value) and str(model) in str(refused.value)
    assert not here.out.exists()
